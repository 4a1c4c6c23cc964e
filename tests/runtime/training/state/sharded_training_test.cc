// Tests of training whose state is sharded over ranks: all levels are bit-identical, losses do not depend on the world
// size, the traffic matches its formula, and a state resumes at other levels and world sizes.
#include <ATen/ops/arange.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "comm/threads/threads.h"
#include "common/error.h"
#include "runtime/training/training.h"
#include "tests/common/equal_losses.h"
#include "tests/common/expect_error.h"
#include "tests/runtime/data/whole_rows.h"
#include "tests/runtime/model/dense_attention.h"
#include "tests/runtime/model/flat_parameters.h"
#include "tests/runtime/training/kept_state.h"
#include "tests/runtime/training/tiny_run.h"

namespace annulus::sharded_training_test {
namespace {

struct Trained {
  std::vector<double> losses, norms;
  double validation = 0;
  std::string digest;
  std::map<std::string, at::Tensor> tensors;  // at the end
};

// Declares rank r to be on host r / ranks_of_a_host.
void put_on_hosts(Communicator& world, int ranks_of_a_host) {
  std::vector<int> of;
  for (int r = 0; r < world.size(); ++r) of.push_back(r / ranks_of_a_host);
  world.set_hosts(of);
}

// Trains on `ranks` threads, which are treated as hosts of `ranks_of_a_host` ranks each (0: one host).
Trained train(const Config& config, int ranks, int64_t steps, int ranks_of_a_host = 0,
              const KeptState* from = nullptr) {
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  std::mutex mutex;
  std::vector<Trained> trained(static_cast<size_t>(ranks));
  KeptState kept;
  run_ranks(ranks, [&](Communicator& world) {
    const Sharding sharding = make_sharding(config, ranks, ranks_of_a_host > 0 ? ranks_of_a_host : ranks);
    if (ranks_of_a_host > 0) put_on_hosts(world, ranks_of_a_host);
    Training training(config, check_training(config, ranks), world, data, at::kCPU, sharding);
    if (from != nullptr) from->restore(training);
    Trained& mine = trained[static_cast<size_t>(world.rank())];
    while (training.steps_done() < steps) {
      const StepResult result = training.step();
      EXPECT_TRUE(result.applied) << result.note;
      mine.losses.push_back(result.loss);
      mine.norms.push_back(result.gradient_norm);
    }
    mine.validation = training.validate([] { return false; }).loss;
    mine.digest = training.weights_digest();
    keep_together(kept, training, world);
  });
  for (const Trained& t : trained) {
    EXPECT_EQ(t.losses, trained[0].losses) << "all ranks see the same loss";
    EXPECT_EQ(t.digest, trained[0].digest);
  }
  trained[0].tensors = kept.tensors;
  return trained[0];
}

void expect_same_bits(const Trained& a, const Trained& b, const std::string& what) {
  EXPECT_EQ(a.losses, b.losses) << what;
  EXPECT_EQ(a.norms, b.norms) << what;
  EXPECT_EQ(a.validation, b.validation) << what;
  EXPECT_EQ(a.digest, b.digest) << what;
  ASSERT_EQ(a.tensors.size(), b.tensors.size()) << what;
  for (const auto& [name, tensor] : a.tensors) EXPECT_TRUE(tensor.equal(b.tensors.at(name))) << what << ", " << name;
}

// A configuration with shapes that the number of ranks need not divide; everything else is drawn at random.
Config drawn_config(const TestFolder& folder, std::mt19937& random, int ranks) {
  const auto one_of = [&](auto... values) {
    const std::common_type_t<decltype(values)...> list[] = {values...};
    return list[random() % sizeof...(values)];
  };
  Config c = tiny_config(folder);
  c.model.layers = one_of(1, 2, 3);
  c.model.dim = one_of(24, 40);
  c.model.heads = 2;
  c.model.kv_heads = one_of(1, 2);
  c.model.ffn = one_of(52, 64);
  c.model.vocab = one_of(256, 301);
  c.model.tie_embeddings = one_of(0, 1) == 1;
  c.model.recompute = one_of(0, 1) == 1;
  c.model.dropout = one_of(0.0, 0.1);
  c.model.dtype = std::vector<std::string>{"fp32", "bf16", "fp64"}[random() % 3];
  c.data.accumulate = one_of(1, 2, 3);
  c.data.documents = one_of(0, 1) == 1;
  c.data.context = 48;
  c.data.batch = 12;
  c.mesh.data = one_of(1, ranks, ranks == 4 ? 2 : 1);
  c.optimizer.clip = one_of(0.0, 0.5);
  return c;
}

// The ranges of norms begin inside a block of 16 elements if the width is not a multiple of 16.
ParameterGroups some_groups() {
  return {{{.match = "*.post_attention_layernorm.weight", .lr = 0.5, .weight_decay = 0.3},
           {.match = "model.embed_tokens.*", .lr = 0.1, .weight_decay = {}},
           {.match = "*.1.*_proj.weight", .lr = 2, .weight_decay = 0}}};
}

// The rates of a parameter with or without these groups: the factor on the scheduled learning rate and the weight
// decay.
std::pair<double, double> rates_of(const Config& config, const std::string& name, int64_t dimensions) {
  const double decay = dimensions == 2 ? config.optimizer.weight_decay : 0;
  if (config.optimizer.groups.list.empty()) return {1, decay};
  if (name.ends_with("post_attention_layernorm.weight")) return {0.5, 0.3};
  if (name.starts_with("model.embed_tokens.")) return {0.1, decay};
  if (name.starts_with("model.layers.1.") && name.ends_with("_proj.weight")) return {2, 0};
  return {1, decay};
}

std::string text_of(const Config& c, int ranks) {
  return std::to_string(ranks) + " ranks, data " + std::to_string(c.mesh.data) + ", " + std::to_string(c.model.layers) +
         " layers, " + c.model.dtype + (c.model.tie_embeddings ? ", tied" : "") +
         (c.model.recompute ? ", recomputed" : "") + ", accumulate " + c.data.accumulate.text();
}

TEST(ShardedTraining, AllLevelsAreBitIdentical) {
  const TestFolder folder;
  std::mt19937 random(7);
  for (int draw = 0; draw < 9; ++draw) {
    const int ranks = 2 + draw % 3;
    Config config = drawn_config(folder, random, ranks);
    const Trained whole = train(config, ranks, 4);
    EXPECT_NE(whole.losses.front(), whole.losses.back());
    for (const int64_t level : {1, 2, 3}) {
      config.optimizer.shard = level;
      expect_same_bits(whole, train(config, ranks, 4),
                       "level " + std::to_string(level) + ", " + text_of(config, ranks));
    }
  }
}

// The ranges of the groups begin anywhere in a shard, and the steps have more and more rows.
TEST(ShardedTraining, GroupsAndBatchRampAreBitIdenticalAtAllLevels) {
  const TestFolder folder;
  std::mt19937 random(11);
  for (int draw = 0; draw < 3; ++draw) {
    const int ranks = 2 + draw % 3;
    Config config = drawn_config(folder, random, ranks);
    config.model.dim = draw % 2 == 0 ? 20 : 36;
    config.model.layers = 2;
    const Trained plain = train(config, ranks, 4);
    config.optimizer.groups = some_groups();
    config.data.accumulate.stages = {{.step = 0, .batches = 1}, {.step = 1, .batches = 2}, {.step = 3, .batches = 3}};
    const Trained whole = train(config, ranks, 4);
    EXPECT_NE(whole.digest, plain.digest);
    for (const int64_t level : {1, 2, 3}) {
      config.optimizer.shard = level;
      expect_same_bits(whole, train(config, ranks, 4),
                       "level " + std::to_string(level) + ", " + text_of(config, ranks));
    }
  }
}

// Sharding within hosts sums in another order than sharding over the world: the levels are bit-identical among
// themselves, and the losses equal those of the world up to rounding.
TEST(ShardedTraining, ShardingWithinHostsIsBitIdenticalAtAllLevels) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.model.dtype = "fp64";
  const Trained world = train(config, 4, 4);
  config.optimizer.shard_within = "host";
  for (const int ranks_of_a_host : {1, 2, 4}) {
    config.optimizer.shard = 0;
    const Trained whole = train(config, 4, 4, ranks_of_a_host);
    expect_equal_losses(whole.losses, world.losses, std::to_string(ranks_of_a_host) + " a host");
    for (const int64_t level : {1, 2, 3}) {
      config.optimizer.shard = level;
      expect_same_bits(whole, train(config, 4, 4, ranks_of_a_host),
                       std::to_string(ranks_of_a_host) + " a host, level " + std::to_string(level));
    }
  }
}

// A sum over a world of several hosts has the same order as one over replicas of which each host has one.
TEST(ShardedTraining, ShardingOverHostsMatchesShardingWithinThem) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.model.dtype = "fp64";
  config.data.batch = 12;
  config.data.context = 48;
  config.optimizer.clip = 0;  // the norm is the sum of the shards' squares, which differ
  for (const auto& [ranks, a_host] : {std::pair(4, 2), std::pair(3, 2)}) {
    config.optimizer.shard = 3;
    config.optimizer.shard_within = "world";
    const Trained over_hosts = train(config, ranks, 4, a_host), one_host = train(config, ranks, 4);
    expect_equal_losses(over_hosts.losses, one_host.losses, std::to_string(ranks) + " ranks");
    for (const int64_t level : {0, 1, 2}) {
      config.optimizer.shard = level;
      expect_same_bits(over_hosts, train(config, ranks, 4, a_host),
                       std::to_string(ranks) + " ranks, level " + std::to_string(level));
    }
    if (ranks % a_host != 0) continue;
    config.optimizer.shard_within = "host";
    EXPECT_EQ(train(config, ranks, 4, a_host).losses, over_hosts.losses);
  }
}

TEST(ShardedTraining, RefusesHostsWithUnequalRankCounts) {
  Config config;
  config.optimizer.shard_within = "host";
  expect_error(ErrorKind::kPlan, {"of 6 ranks 4 are on one"}, [&] { make_sharding(config, 6, 4); });
}

// All world sizes and levels have the same losses as training on one rank without sharding.
TEST(ShardedTraining, LossesDoNotDependOnTheWorldSize) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.model.dtype = "fp64";
  config.run.steps = 20;
  config.data.batch = 12;
  config.data.context = 48;
  const Trained one = train(config, 1, 20);
  for (const int ranks : {2, 3, 4}) {
    config.optimizer.shard = ranks - 1;
    expect_equal_losses(train(config, ranks, 20).losses, one.losses, std::to_string(ranks) + " ranks");
  }
}

// The losses of a job whose whole batch passes through one model, in fp64, with dense attention and AdamW's formula.
std::vector<double> losses_of_one_model(const Config& config, int64_t steps) {
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  Model model(model_shape(config), static_cast<uint64_t>(config.run.seed), at::kDouble);
  const std::vector<NamedTensor> values = model.parameters().value_views();
  const std::vector<NamedTensor> gradients = model.parameters().gradient_views();
  const OptimizerSettings s = optimizer_settings(config);
  std::vector<at::Tensor> m, v;
  for (const NamedTensor& t : values) {
    m.push_back(at::zeros_like(t.tensor));
    v.push_back(at::zeros_like(t.tensor));
  }
  std::vector<double> losses;
  for (int64_t step = 0; step < steps; ++step) {
    std::vector<at::Tensor> tokens, targets;
    for (int64_t r = 0; r < data.rows(step); ++r) {
      const Row row = whole_row(data, step, r);
      tokens.push_back(at::tensor(row.tokens));
      targets.push_back(at::tensor(row.targets));
    }
    const at::Tensor all = at::stack(targets).view({-1});
    zero_gradients(model.parameters());
    const at::Tensor loss =
        model.loss(at::stack(tokens), all, model.rotary(at::arange(tokens[0].numel(), at::kLong)), dense_causal(),
                   1.0 / static_cast<double>(all.ne(kNoTarget).sum().item<int64_t>()));
    loss.backward();
    losses.push_back(loss.item<double>());
    double squares = 0;
    for (const NamedTensor& t : gradients) squares += t.tensor.square().sum().item<double>();
    const double clipped = s.clip > 0 ? std::min(1.0, s.clip / std::sqrt(squares)) : 1;
    const double n = static_cast<double>(step + 1);
    for (size_t i = 0; i < values.size(); ++i) {
      const at::Tensor g = gradients[i].tensor.mul(clipped);
      m[i].mul_(s.beta1).add_(g, 1 - s.beta1);
      v[i].mul_(s.beta2).add_(g.square(), 1 - s.beta2);
      const auto [of_lr, decay] = rates_of(config, values[i].name, values[i].tensor.dim());
      const double lr = of_lr * learning_rate(s, step);
      values[i].tensor.mul_(1 - lr * decay);
      const at::Tensor mean = m[i].div(1 - std::pow(s.beta1, n)), square = v[i].div(1 - std::pow(s.beta2, n));
      values[i].tensor.sub_(mean.div(square.sqrt().add(s.eps)).mul(lr));
    }
  }
  return losses;
}

TEST(ShardedTraining, MatchesOneModelOnTheFullBatch) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.model.dtype = "fp64";
  config.run.steps = 20;
  config.data.batch = 12;
  config.data.context = 48;
  config.optimizer.shard = 3;
  for (const bool tied : {false, true}) {
    config.model.tie_embeddings = tied;
    config.optimizer.groups = tied ? ParameterGroups() : some_groups();
    const std::vector<double> want = losses_of_one_model(config, 20);
    EXPECT_LT(want.back(), want.front() - 1) << "it learns";
    for (const int ranks : {2, 4}) {
      expect_equal_losses(train(config, ranks, 20).losses, want,
                          (tied ? "tied, " : "") + std::to_string(ranks) + " ranks");
    }
  }
}

TEST(ShardedTraining, StateResumesAtEveryLevelAndWorldSize) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.model.dtype = "fp64";
  config.data.batch = 12;
  config.data.context = 48;
  config.optimizer.shard = 3;
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  KeptState kept;
  std::string straight;
  run_ranks(4, [&](Communicator& world) {
    Training training(config, world, data, at::kCPU);
    for (int i = 0; i < 3; ++i) training.step();
    keep_together(kept, training, world);
    for (int i = 0; i < 3; ++i) training.step();
    const std::string digest = training.weights_digest();
    if (world.rank() == 0) straight = digest;
  });
  config.optimizer.shard = 0;
  config.mesh.data = 1;
  const Trained want = train(config, 4, 6, 0, &kept);
  EXPECT_EQ(want.digest, straight) << "the same world size resumes bit-identically";
  for (const int ranks : {1, 2, 3, 6}) {
    config.mesh.data = ranks;
    for (const int64_t level : {0, 1, 2, 3}) {
      config.optimizer.shard = level;
      const Trained got = train(config, ranks, 6, 0, &kept);
      ASSERT_EQ(got.losses.size(), 3U);
      expect_equal_losses(got.losses, want.losses, std::to_string(ranks) + " ranks, level " + std::to_string(level), 3);
    }
  }
}

TEST(ShardedTraining, EachElementIsWrittenByOneRank) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  for (const std::string within : {"world", "host"}) {
    for (const int64_t level : {0, 3}) {
      config.optimizer.shard_within = within;
      config.optimizer.shard = level;
      std::mutex mutex;
      int64_t written = 0, parameters = 0;
      run_ranks(4, [&](Communicator& world) {
        const Training training(config, check_training(config, 4), world, data, at::kCPU, make_sharding(config, 4, 2));
        const std::lock_guard lock(mutex);
        for (const TensorSlice& slice : training.slices_to_write()) written += slice.values.numel();
        parameters = training.model().parameters().count();
      });
      EXPECT_EQ(written, 3 * parameters) << within << ", level " << level;
    }
  }
}

// Each rank sends exactly as many bytes for its state as the formula says.
TEST(ShardedTraining, BytesSentMatchTheFormula) {
  const TestFolder folder;
  for (const std::string dtype : {"fp32", "bf16", "fp64"}) {
    for (const bool tied : {false, true}) {
      for (const int ranks : {2, 4}) {
        for (const int64_t accumulate : {1, 2}) {
          for (const int64_t level : {0, 1, 2, 3}) {
            Config config = tiny_config(folder);
            config.model.layers = 3;
            config.model.dtype = dtype;
            config.model.tie_embeddings = tied;
            config.model.recompute = true;
            config.data.accumulate = accumulate;
            config.optimizer.shard = level;
            const Dataset data(config.data, config.run.seed, config.model.vocab);
            run_ranks(ranks, [&](Communicator& world) {
              Training training(config, world, data, at::kCPU);
              training.step();
              const ModelState& state = training.model_state();
              const int64_t before = state.sharers()->stats().collective_bytes_sent;
              training.step();
              const StateTraffic t = state_traffic(training.model().parameters(), state.sharding(), tied, accumulate);
              const double sum = dtype == "fp64" ? 8 : 4, leaf = dtype == "bf16" && level > 0 ? 2 : sum;
              const double want = sum * t.reduced + leaf * t.gathered;
              EXPECT_EQ(static_cast<double>(state.sharers()->stats().collective_bytes_sent - before), want)
                  << dtype << (tied ? ", tied, " : ", ") << ranks << " ranks, level " << level << ", accumulate "
                  << accumulate;
              EXPECT_LE(t.reduced + t.gathered / static_cast<double>(accumulate),
                        (level == 3 ? 3.0 : 2.0) * (ranks - 1) / ranks *
                            static_cast<double>(training.model().parameters().elements() +
                                                (tied && level == 3 ? 256 * 32 : 0)));
            });
          }
        }
      }
    }
  }
}

// The bytes that all ranks together send to other hosts in a step of a bf16 model when the ranks of each host are
// consecutive: for shards dealt over `hosts` hosts, or for replicas of which each host has one.
double bytes_between_hosts(const Parameters& parameters, const Sharding& s, const StateTraffic& t, int hosts) {
  const double crossings = hosts - 1, sum = 4, gathered = s.level > 0 ? 2 : sum;  // bytes of an element
  if (s.replicas > 1) return crossings * 2 * static_cast<double>(parameters.elements()) * sum;
  if (s.shards == 1) return 0;
  const double payload = static_cast<double>(s.shards) / (s.shards - 1);  // of what a rank sends
  return crossings * payload * (t.reduced * sum + t.gathered * gathered);
}

// Exactly as many bytes cross between hosts for the state as the formula says.
TEST(ShardedTraining, BytesBetweenHostsMatchTheFormula) {
  const TestFolder folder;
  const std::vector<std::pair<int, int>> layouts{{4, 2}, {4, 1}, {3, 2}, {4, 4}};  // ranks, ranks of a host
  for (const auto& [ranks, a_host] : layouts) {
    for (const std::string within : {"world", "host"}) {
      if (within == "host" && ranks % a_host != 0) continue;
      for (const int64_t level : {0, 1, 2, 3}) {
        Config config = tiny_config(folder);
        config.model.layers = 3;
        config.model.dtype = "bf16";
        config.data.batch = 12;
        config.data.context = 48;
        config.optimizer.shard = level;
        config.optimizer.shard_within = within;
        const Dataset data(config.data, config.run.seed, config.model.vocab);
        std::mutex mutex;
        int64_t sent = 0;
        double want = 0;
        run_ranks(ranks, [&, ranks = ranks, a_host = a_host](Communicator& world) {
          put_on_hosts(world, a_host);
          Training training(config, check_training(config, ranks), world, data, at::kCPU,
                            make_sharding(config, ranks, a_host));
          training.step();
          const ModelState& state = training.model_state();
          const auto crossed = [&] {
            int64_t bytes = 0;
            for (const Communicator* comm : {state.sharers(), state.replicas()}) {
              if (comm != nullptr) bytes += comm->stats().collective_bytes_to_other_hosts;
            }
            return bytes;
          };
          const int64_t before = crossed();
          training.step();
          const Parameters& parameters = training.model().parameters();
          const StateTraffic t = state_traffic(parameters, state.sharding(), false, 1);
          const std::lock_guard lock(mutex);
          sent += crossed() - before;
          want = bytes_between_hosts(parameters, state.sharding(), t, (ranks + a_host - 1) / a_host);
        });
        EXPECT_EQ(static_cast<double>(sent), want)
            << ranks << " ranks, " << a_host << " a host, sharing within " << within << ", level " << level;
        EXPECT_EQ(want > 0, a_host < ranks);
      }
    }
  }
}

}  // namespace
}  // namespace annulus::sharded_training_test
