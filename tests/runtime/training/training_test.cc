// Tests of runtime/training/training.h over threads: losses do not depend on the number of ranks, repeated runs are
// bit-identical, and configurations that cannot work are refused.
#include "runtime/training/training.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <mutex>

#include "comm/threads/threads.h"
#include "common/error.h"
#include "tests/common/equal_losses.h"
#include "tests/common/expect_error.h"
#include "tests/runtime/training/kept_state.h"
#include "tests/runtime/training/tiny_run.h"

namespace annulus::training_test {
namespace {

struct Curve {
  std::vector<double> losses;
  std::vector<double> norms;
  double validation = 0;
  std::string digest;
};

// `number[r]` is the rank in the job of thread r; if `number` is empty, it is r itself.
Curve train(const Config& config, int ranks, int64_t steps, const std::vector<int>& number = {}) {
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  std::mutex mutex;
  std::vector<Curve> curves(ranks);
  run_ranks(ranks, [&](Communicator& started) {
    const std::unique_ptr<Communicator> renumbered =
        started.split(0, number.empty() ? started.rank() : number[static_cast<size_t>(started.rank())]);
    Communicator& world = *renumbered;
    Training training(config, world, data, at::kCPU);
    Curve curve;
    for (int64_t i = 0; i < steps; ++i) {
      const StepResult r = training.step();
      EXPECT_TRUE(r.applied);
      EXPECT_FALSE(r.stop);
      curve.losses.push_back(r.loss);
      curve.norms.push_back(r.gradient_norm);
    }
    curve.validation = training.validate([] { return false; }).loss;
    curve.digest = training.weights_digest();
    const std::lock_guard lock(mutex);
    curves[world.rank()] = curve;
  });
  for (const Curve& c : curves) {
    EXPECT_EQ(c.losses, curves[0].losses) << "all ranks see the same loss";
    EXPECT_EQ(c.digest, curves[0].digest) << "all ranks hold the same weights";
  }
  return curves[0];
}

// For curves in fp64.
void expect_same_curve(const Curve& a, const Curve& b, const std::string& what) {
  expect_equal_losses(b.losses, a.losses, what);
  expect_equal_losses(b.norms, a.norms, what + ", gradient norms");
  expect_equal_losses({b.validation}, {a.validation}, what + ", validation", a.losses.size());
}

TEST(Training, LossesDoNotDependOnTheRanks) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.model.dtype = "fp64";
  config.run.steps = 30;
  const Curve one = train(config, 1, 30);
  EXPECT_LT(one.losses.back(), one.losses[0] - 1) << "it learns";
  for (const std::string layout : {"zigzag", "contiguous", "striped", "balanced", "per-document"}) {
    config.attention.layout = layout;
    for (const int ranks : {2, 4}) {
      expect_same_curve(one, train(config, ranks, 30), layout + " over " + std::to_string(ranks));
    }
  }
  config.attention.layout = "zigzag";
  for (const std::string schedule : {"all-gather", "group-cast", "double-ring", "ulysses", "ulysses-ring", "mesh"}) {
    config.attention.schedule = schedule;
    config.attention.within = schedule == "all-gather" ? 0 : 2;
    expect_same_curve(one, train(config, 4, 30), schedule);
  }
  config.attention.schedule = "ring";
  config.attention.within = 0;
  config.mesh.data = 2;
  expect_same_curve(one, train(config, 4, 30), "2 data x 2 context");
  config.mesh.data = 4;
  expect_same_curve(one, train(config, 4, 30), "4 data x 1 context");
}

TEST(Training, AcceptsUnevenSharesOnlyIfAllowed) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.model.dtype = "fp64";
  config.data.context = 61;
  EXPECT_THROW(check_training(config, 3), Error);
  config.attention.even = false;
  const Curve one = train(config, 1, 5);
  expect_same_curve(one, train(config, 3, 5), "61 tokens over 3");
}

// rank_order_by_host numbers the ranks by their hosts; the results do not depend on this order.
TEST(Training, RingOrderDoesNotChangeBits) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.attention.schedule = "ring";
  for (const int64_t data : {1, 2}) {
    config.mesh.data = data;
    const Curve plain = train(config, 4, 4);
    for (const std::vector<int>& number : {std::vector<int>{0, 2, 1, 3}, std::vector<int>{3, 1, 0, 2}}) {
      const Curve other = train(config, 4, 4, number);
      EXPECT_EQ(plain.losses, other.losses);
      EXPECT_EQ(plain.norms, other.norms);
      EXPECT_EQ(plain.validation, other.validation);
      EXPECT_EQ(plain.digest, other.digest);
    }
  }
}

TEST(Training, RepeatedRunsAreBitIdentical) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.model.tie_embeddings = true;
  for (const std::string dtype : {"fp32", "bf16", "fp64"}) {
    config.model.dtype = dtype;
    for (const int ranks : {1, 2}) {
      const Curve a = train(config, ranks, 6);
      const Curve b = train(config, ranks, 6);
      EXPECT_EQ(a.losses, b.losses);
      EXPECT_EQ(a.norms, b.norms);
      EXPECT_EQ(a.validation, b.validation);
      EXPECT_EQ(a.digest, b.digest);
    }
  }
  config.run.seed = 2;
  EXPECT_NE(train(config, 1, 1).digest, train(tiny_config(folder), 1, 1).digest);
}

TEST(Training, RecomputationDoesNotChangeBits) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.model.dropout = 0.2;
  for (const std::string dtype : {"fp32", "bf16", "fp64"}) {
    config.model.dtype = dtype;
    for (const int ranks : {1, 2}) {
      config.model.recompute = false;
      const Curve kept = train(config, ranks, 4);
      config.model.recompute = true;
      const Curve recomputed = train(config, ranks, 4);
      EXPECT_EQ(kept.losses, recomputed.losses);
      EXPECT_EQ(kept.norms, recomputed.norms);
      EXPECT_EQ(kept.digest, recomputed.digest);
    }
  }
}

// Everything that lasts is fp64, and the weights begin as those of fp32, so that the two runs can be compared.
TEST(Training, Fp64StateBeginsAsThatOfFp32) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.model.qk_norm = config.model.qkv_bias = true;
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  for (const int64_t level : {0, 1, 2, 3}) {
    config.optimizer.shard = level;
    KeptState narrow, wide;
    run_ranks(2, [&](Communicator& world) {
      Config c = config;
      const Training fp32(c, world, data, at::kCPU);
      keep_together(narrow, fp32, world);
      c.model.dtype = "fp64";
      Training fp64(c, world, data, at::kCPU);
      keep_together(wide, fp64, world);
      fp64.step();
      for (const Updated& of_unit : fp64.model_state().updated()) {
        EXPECT_EQ(of_unit.values.scalar_type(), at::kDouble);
        EXPECT_EQ(of_unit.gradients.scalar_type(), at::kDouble);
      }
      EXPECT_EQ(fp64.model().parameters().dtype(), at::kDouble);
    });
    ASSERT_EQ(wide.tensors.size(), narrow.tensors.size());
    for (const auto& [name, tensor] : wide.tensors) {
      EXPECT_EQ(tensor.scalar_type(), at::kDouble) << name;
      EXPECT_TRUE(tensor.equal(narrow.tensors.at(name).to(at::kDouble))) << name << ", level " << level;
    }
  }
}

TEST(Training, Bf16LeavesAreRoundedFromFp32Weights) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.model.dtype = "bf16";
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  const std::shared_ptr<Communicator> world = make_self_communicator();
  Training training(config, *world, data, at::kCPU);
  const Parameters& p = training.model().parameters();
  for (int i = 0; i < 3; ++i) {
    training.step();
    KeptState kept;
    kept.keep(training);
    for (const auto& [name, tensor] : kept.tensors) EXPECT_EQ(tensor.scalar_type(), at::kFloat) << name;
    training.validate([] { return false; });  // a forward pass updates the leaves
    bool finer = false;
    for (const NamedTensor& leaf : p.value_views()) {
      EXPECT_EQ(leaf.tensor.scalar_type(), at::kBFloat16);
      EXPECT_TRUE(leaf.tensor.equal(kept.tensors.at(leaf.name).to(at::kBFloat16))) << leaf.name;
      finer = finer || !leaf.tensor.to(at::kFloat).equal(kept.tensors.at(leaf.name));
    }
    EXPECT_TRUE(finer) << "the fp32 weights keep updates below the last bit of bf16";
  }
}

// A state that is restored in another dtype is rounded to it once, and the run goes on from there as if it had that
// state in its own dtype.
TEST(Training, StateResumesInTheOtherDtype) {
  const TestFolder folder;
  const Config plain = tiny_config(folder);
  const Dataset data(plain.data, plain.run.seed, plain.model.vocab);
  const std::shared_ptr<Communicator> world = make_self_communicator();
  const auto in = [&](const std::string& dtype) {
    Config config = plain;
    config.model.dtype = dtype;
    return std::make_unique<Training>(config, *world, data, at::kCPU);
  };
  for (const std::string from : {"fp32", "bf16", "fp64"}) {
    const std::unique_ptr<Training> before = in(from);
    for (int i = 0; i < 3; ++i) before->step();
    KeptState kept;
    kept.keep(*before);
    for (const std::string to : {"fp32", "bf16", "fp64"}) {
      const std::unique_ptr<Training> other = in(to), same = in(to);
      const at::ScalarType type = to == "fp64" ? at::kDouble : at::kFloat;
      KeptState rounded;
      rounded.keep(*same);  // of the right dtypes
      rounded.state = kept.state;
      for (auto& [name, tensor] : rounded.tensors) tensor.copy_(kept.tensors.at(name));
      rounded.restore(*same);
      kept.restore(*other);
      KeptState restored;
      restored.keep(*other);
      for (const auto& [name, tensor] : restored.tensors) {
        EXPECT_TRUE(tensor.equal(kept.tensors.at(name).to(type))) << from << " to " << to << ", " << name;
      }
      EXPECT_EQ(other->step().loss, same->step().loss) << from << " to " << to;
      EXPECT_EQ(other->weights_digest(), same->weights_digest()) << from << " to " << to;
    }
  }
}

TEST(Training, RestoredStateContinuesBitIdentically) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  for (const std::string dtype : {"fp32", "bf16", "fp64"}) {
    config.model.dtype = dtype;
    KeptState kept;
    run_ranks(2, [&](Communicator& world) {
      Training straight(config, world, data, at::kCPU);
      for (int i = 0; i < 3; ++i) straight.step();
      keep_together(kept, straight, world);
      for (int i = 0; i < 3; ++i) straight.step();
      Training resumed(config, world, data, at::kCPU);
      kept.restore(resumed);
      EXPECT_EQ(resumed.steps_done(), 3);
      for (int i = 0; i < 3; ++i) resumed.step();
      EXPECT_EQ(resumed.weights_digest(), straight.weights_digest());
    });
  }
}

TEST(Training, RefusesAStateWithoutItsCounters) {
  const TestFolder folder;
  const Config config = tiny_config(folder);
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  const std::shared_ptr<Communicator> world = make_self_communicator();
  Training training(config, *world, data, at::kCPU);
  const std::string before = training.weights_digest();
  for (const char* updates : {"", "-1", "7", "x"}) {
    KeptState kept;
    kept.keep(training);
    for (auto& [name, tensor] : kept.tensors) tensor.zero_();
    kept.state.extra["updates"] = updates;
    expect_error(ErrorKind::kInput, {"updates"}, [&] { kept.restore(training); });
    EXPECT_EQ(training.weights_digest(), before);
  }
}

TEST(Training, StopRequestOnOneRankStopsAll) {
  const TestFolder folder;
  const Config config = tiny_config(folder);
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  run_ranks(2, [&](Communicator& world) {
    Training training(config, world, data, at::kCPU);
    EXPECT_FALSE(training.step(false).stop);
    EXPECT_TRUE(training.step(world.rank() == 1).stop);
    int batches = 0;
    EXPECT_TRUE(training.validate([&] { return ++batches == 2 && world.rank() == 0; }).stop);
    EXPECT_EQ(batches, 2);
  });
}

// Otherwise each of a step's calls would wait for the other ranks before it begins: 2 layers, 3 batches, two
// directions.
TEST(Training, RanksAgreeOncePerStepOnAllCallsOfAttention) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.data.accumulate = 3;
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  run_ranks(2, [&](Communicator& world) {
    Training training(config, world, data, at::kCPU);
    const CommStats& ring = training.mesh().axis("context").stats();
    for (int i = 0; i < 2; ++i) {
      const int64_t before = ring.collectives;
      training.step();
      EXPECT_EQ(ring.collectives - before, 1);
    }
    const int64_t before = ring.collectives;
    training.validate([] { return false; });
    EXPECT_EQ(ring.collectives - before, config.validation.batches);
  });
}

// A model whose weights are zero gives every byte the same probability, so that the loss of each batch is ln 256, and
// so is their mean.
TEST(Training, LossIsTheMeanOverTheBatch) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.model.dtype = "fp64";
  config.validation.batches = 3;
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  for (const int ranks : {1, 2}) {
    run_ranks(ranks, [&](Communicator& world) {
      Training training(config, world, data, at::kCPU);
      training.restore(training.state(), [](const std::vector<TensorSlice>& into) {
        for (const TensorSlice& slice : into) at::Tensor(slice.values).zero_();
      });
      expect_equal_losses({training.validate([] { return false; }).loss}, {std::log(256.0)}, "validation");
      expect_equal_losses({training.step().loss}, {std::log(256.0)}, "training");
    });
  }
}

void break_weights(KeptState& kept) {
  kept.tensors.at("model.layers.0.self_attn.q_proj.weight").fill_(std::numeric_limits<double>::quiet_NaN());
}

TEST(Training, SkipsNonFiniteUpdates) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  for (const int64_t level : {0, 2, 3}) {
    config.optimizer.shard = level;
    KeptState whole, broken;
    run_ranks(2, [&](Communicator& world) {
      Training training(config, world, data, at::kCPU);
      training.step();
      keep_together(whole, training, world);
      keep_together(broken, training, world);
      if (world.rank() == 0) {
        break_weights(broken);
        whole.state.step = 20;  // the update of a repeated step would not reset the count of skipped updates
      }
      world.barrier({"breaking the weights", 0});
      broken.restore(training);
      const std::string before = training.weights_digest();
      for (int i = 0; i < 9; ++i) EXPECT_FALSE(training.step().applied);
      EXPECT_EQ(training.weights_digest(), before);
      EXPECT_EQ(training.state().extra.at("updates"), "1");
      whole.restore(training);
      EXPECT_TRUE(training.step().applied);  // this resets the count
      EXPECT_NO_THROW(training.require_updates());
      broken.restore(training);
      training.step();
      EXPECT_NO_THROW(training.require_updates());  // two updates were applied, and only the last one was left out
      training.step();
      EXPECT_THROW(training.require_updates(), Error);
      for (int i = 2; i < 9; ++i) training.step();
      EXPECT_THROW(training.step(), Error);
    });
  }
  Config two = config;
  two.optimizer.skips = 2;
  run_ranks(1, [&](Communicator& world) {
    Training training(two, world, data, at::kCPU);
    KeptState broken;
    broken.keep(training);
    break_weights(broken);
    broken.restore(training);
    training.step();
    EXPECT_THROW(training.step(), Error);
  });
}

// The gradients would be divided by more than fp32 can hold.
TEST(Training, SkipsUpdatesThatCannotBeClipped) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.optimizer.clip = 1e-42;
  config.optimizer.skips = 3;
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  for (const int64_t level : {0, 3}) {
    config.optimizer.shard = level;
    run_ranks(2, [&](Communicator& world) {
      Training training(config, world, data, at::kCPU);
      const std::string before = training.weights_digest();
      for (int i = 0; i < 2; ++i) {
        const StepResult result = training.step();
        EXPECT_FALSE(result.applied);
        EXPECT_TRUE(std::isfinite(result.gradient_norm));
        EXPECT_NE(result.note.find("times optimizer.clip = 1e-42, so it cannot be clipped"), std::string::npos)
            << result.note;
      }
      EXPECT_EQ(training.weights_digest(), before);
      expect_error(ErrorKind::kUsage, {"Raise optimizer.clip"}, [&] { training.step(); });
    });
  }
  config.model.dtype = "fp64";
  run_ranks(1, [&](Communicator& world) {
    Training training(config, world, data, at::kCPU);
    EXPECT_TRUE(training.step().applied) << "fp64 holds the ratio";
  });
}

TEST(Training, RefusesConfigurationsThatDoNotFitTheRanks) {
  const TestFolder folder;
  const auto refused = [&](int ranks, const std::function<void(Config&)>& change, const std::string& word) {
    Config config = tiny_config(folder);
    change(config);
    try {
      check_training(config, ranks);
      FAIL() << word;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(word), std::string::npos) << e.what();
    }
  };
  refused(
      3, [](Config& c) { c.mesh.data = 2; }, "mesh");
  refused(
      3, [](Config& c) { c.mesh.data = 3; }, "data.batch");
  refused(
      3, [](Config&) {}, "64");  // zigzag over 3 needs a multiple of 6
  refused(
      1, [](Config& c) { c.model.heads = 3; }, "model.dim");
  refused(
      40, [](Config& c) { c.attention.even = false; }, "data.context");
  refused(
      1, [](Config& c) { c.attention.kernel = "cpus"; }, "cpu");
}

}  // namespace
}  // namespace annulus::training_test
