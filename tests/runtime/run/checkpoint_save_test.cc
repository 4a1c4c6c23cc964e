// Tests of saves behind training (runtime/run/checkpoint_save.h): what they write and when they publish it.
#include "runtime/run/checkpoint_save.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/error.h"
#include "memory/tiers/tier_file.h"
#include "memory/tiers/tiered_tensors.h"
#include "tests/common/hooked_files.h"
#include "tests/runtime/run/cut_checkpoints.h"

namespace annulus::checkpoint_save_test {
namespace {

using Writes = CheckpointSave::Writes;

// A gate that is closed until it is opened, once.
class Gate {
 public:
  void open() { opened_.set_value(); }
  void pass() const { future_.wait(); }

 private:
  std::promise<void> opened_;
  std::shared_future<void> future_ = opened_.get_future().share();
};

bool has(const std::string& run, const std::string& name) {
  const std::vector<std::string> all = names(run);
  return std::count(all.begin(), all.end(), name) > 0;
}

void until_done(CheckpointSave& save) {
  while (!save.done()) {
    save.advance();
    std::this_thread::yield();
  }
}

// No rank writes anything before the slices of all of them have changed, again and again.
TEST(CheckpointSave, WritesWhatTheSlicesHeldWhenItBegan) {
  const std::string run = fresh_run("held");
  Gate gate;
  std::atomic<int> changed = 0;
  HookedFiles files([&](const std::string& operation, const std::string&) {
    if (operation == "create") gate.pass();
  });
  run_ranks(3, [&](Communicator& world) {
    CheckpointStore store(run, 2, files, kBlock);
    for (const int64_t step : {5, 6}) {  // the second save uses the memory of the first
      std::vector<NamedTensor> tensors = tensors_of(step);
      CheckpointSave save(store, world, state_of(step).state, cut(tensors, 3, 1)[static_cast<size_t>(world.rank())],
                          Writes::kBehind);
      for (int i = 0; i < 5; ++i) {
        for (NamedTensor& t : tensors) t.tensor.add_(1);
        if (step == 6) break;
        save.advance();
        EXPECT_FALSE(save.published());
      }
      if (++changed == 3) gate.open();
      until_done(save);
      EXPECT_TRUE(save.published());
    }
    EXPECT_GT(store.copy_bytes(), 0);
  });
  EXPECT_EQ(names(run), (std::vector<std::string>{"step-00000005", "step-00000006"}));
  for (const int64_t step : {6, 5}) {
    EXPECT_EQ(read_back(run, 2), step);
    std::filesystem::remove_all(run + "/checkpoints/step-0000000" + std::to_string(step));
  }
}

// One rank's slices are not on the disk yet, whereas the others have long ended.
TEST(CheckpointSave, IsPublishedOnceTheSlicesOfAllRanksAreOnTheDisk) {
  const std::string run = fresh_run("late");
  Gate gate;
  std::atomic<bool> opened = false;
  std::atomic<int> synced = 0;
  HookedFiles late([&](const std::string& operation, const std::string&) {
    if (operation == "sync") gate.pass();
  });
  HookedFiles others([&](const std::string& operation, const std::string& path) {
    if (operation == "sync folder" && path.find(".tmp-") != std::string::npos) ++synced;
    if (operation == "rename" || (operation == "create" && path.ends_with("manifest.json"))) {
      EXPECT_TRUE(opened) << path;
    }
  });
  run_ranks(3, [&](Communicator& world) {
    CheckpointStore store(run, 2, world.rank() == 1 ? late : others, kBlock);
    const std::string name = "model." + std::to_string(world.rank());
    CheckpointSave save(store, world, state_of(5).state, {{name, {100}, 0, at::ones({100})}}, Writes::kBehind);
    bool ended = false;
    while (!ended) {
      save.advance();
      at::Tensor all = at::full({1}, static_cast<double>(synced));
      world.all_reduce(all, ReduceOp::kMin, {"looking"});
      ended = all.item<float>() == 2;
    }
    for (int i = 0; i < 10; ++i) save.advance();
    EXPECT_FALSE(save.published());
    EXPECT_FALSE(has(run, "step-00000005"));
    world.barrier({"looking"});
    if (world.rank() == 1) {
      opened = true;
      gate.open();
    }
    until_done(save);
    EXPECT_TRUE(has(run, "step-00000005"));
  });
  EXPECT_EQ(read_manifest(run + "/checkpoints/step-00000005").tensors.size(), 3U);
}

// After the failure of one rank another one gives up writing, although it has many blocks left.
TEST(CheckpointSave, RanksGiveUpWhenOneHasFailed) {
  const std::string run = fresh_run("given_up");
  Gate gate;
  std::atomic<int> written = 0;
  HookedFiles full([&](const std::string& operation, const std::string& path) {
    if (operation == "write") throw Error(ErrorKind::kResource, "files", "cannot write " + path + ": no space left");
  });
  HookedFiles slow([&](const std::string& operation, const std::string&) {
    if (operation != "write") return;
    if (++written == 3) gate.pass();
  });
  run_ranks(2, [&](Communicator& world) {
    CheckpointStore store(run, 2, world.rank() == 0 ? full : slow, kBlock);
    const at::Tensor values = at::ones({1000});
    const std::string name = world.rank() == 0 ? "model.a" : "model.b";
    CheckpointSave save(store, world, state_of(5).state, {{name, {1000}, 0, values}}, Writes::kBehind);
    std::string raised;
    // Rank 0 has failed at once; once rank 1 has been told, it goes on from its third block.
    for (int i = 0; raised.empty(); ++i) {
      try {
        save.advance();
      } catch (const Error& error) {
        raised = error.what();
      }
      if (i == 1000 && world.rank() == 1) gate.open();
      std::this_thread::yield();
    }
    EXPECT_NE(raised.find("on rank 0: cannot write "), std::string::npos) << raised;
    EXPECT_EQ(raised.find("rank 1"), std::string::npos) << raised;
  });
  EXPECT_LT(written, 10) << "of 64 blocks";
  EXPECT_TRUE(names(run).empty());
}

// What lies in a file is not held in memory: it is in the checkpoint's file before it may change.
TEST(CheckpointSave, WritesWhatLiesInATierBeforeItChanges) {
  const std::string run = fresh_run("tier");
  TieredTensors tier({.dtype = at::kFloat, .device = at::kCPU, .chunk = 64},
                     TierFile::in_folder(run, "optimizer.offload"));
  const at::Tensor expected = at::arange(1000, at::kFloat);
  const size_t vector = tier.add(1000);
  tier.write(vector, 0, expected);
  at::Tensor weights = at::ones({1000});
  const auto self = make_self_communicator();
  CheckpointStore store(run, 2, FileSystem::real(), kBlock);
  const TensorSlice in_tier{.name = "optimizer.m",
                            .shape = {1000},
                            .values = {},
                            .in_tier = {.tier = &tier, .vector = vector, .begin = 0, .count = 1000}};
  CheckpointSave save(store, *self, {.step = 3}, {{"model.a", {1000}, 0, weights}, in_tier}, Writes::kBehind);
  EXPECT_EQ(store.copy_bytes(), 1000 * 4 / 64 * 64 + 64) << "the weights alone";
  tier.write(vector, 0, at::zeros_like(expected));
  weights.zero_();
  until_done(save);
  const auto state = store.open_newest_valid(*self, nullptr);
  ASSERT_TRUE(state);
  at::Tensor m = at::zeros_like(expected);
  store.read(*state, {{"model.a", {1000}, 0, weights}, {"optimizer.m", {1000}, 0, m}});
  EXPECT_TRUE(at::equal(weights, at::ones({1000})));
  EXPECT_TRUE(at::equal(m, expected));
}

// A save that is abandoned publishes nothing, and the next one removes what it has left.
TEST(CheckpointSave, AbandonedSaveLeavesTheOlderCheckpoint) {
  const std::string run = fresh_run("abandoned");
  saved(run, 1, 1);
  const auto self = make_self_communicator();
  CheckpointStore store(run, 2, FileSystem::real(), kBlock);
  { CheckpointSave save(store, *self, state_of(2).state, cut(tensors_of(2), 1, 1)[0], Writes::kBehind); }
  EXPECT_EQ(read_back(run, 1), 1);
  save_behind(*self, store, 3, 1);
  EXPECT_EQ(names(run), (std::vector<std::string>{"step-00000001", "step-00000003"}));
}

}  // namespace
}  // namespace annulus::checkpoint_save_test
