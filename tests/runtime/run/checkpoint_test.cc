// Tests of checkpoints that one rank saves and loads (runtime/run/checkpoint.h).
#include "runtime/run/checkpoint.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "common/error.h"
#include "runtime/tensor_files/safetensors.h"
#include "tests/common/expect_error.h"
#include "tests/common/faulty_files.h"
#include "tests/common/in_child.h"
#include "tests/runtime/run/checkpoints.h"

namespace annulus::checkpoint_test {
namespace {

namespace fs = std::filesystem;

TEST(Checkpoint, LoadReturnsWhatWasSaved) {
  const std::string run = fresh_run("back");
  WholeState state = state_of(7);
  state.tensors.push_back({"odd", at::randn({4, 6})});
  state.tensors.push_back({"none", at::full({0, 6}, 0)});
  EXPECT_EQ(WholeStore(run, 3).save(state), run + "/checkpoints/step-00000007");
  std::vector<std::string> skipped;
  const auto back = WholeStore(run, 3).load_newest_valid(&skipped);
  ASSERT_TRUE(back);
  EXPECT_TRUE(same(*back, state));
  EXPECT_TRUE(skipped.empty());
  // A file written by one rank is an ordinary safetensors file.
  const SafetensorsFile model(back->state.folder + "/model.safetensors");
  for (const char* name : {"odd", "none", "model.a"}) {
    const auto saved =
        std::find_if(state.tensors.begin(), state.tensors.end(), [&](const NamedTensor& t) { return t.name == name; });
    EXPECT_TRUE(at::equal(model.load(name), saved->tensor)) << name;
  }
}

TEST(Checkpoint, MissingCheckpointIsNotAnError) {
  std::vector<std::string> skipped;
  EXPECT_FALSE(WholeStore(fresh_run("none"), 1).load_newest_valid(&skipped));
  EXPECT_FALSE(WholeStore("/nonexistent", 1).load_newest_valid(nullptr));
  EXPECT_TRUE(skipped.empty());
  EXPECT_THROW(WholeStore("/nonexistent", 1).save(state_of(1)), Error);
  EXPECT_THROW(WholeStore("/nonexistent", 0), Error);
}

// An unreadable checkpoint differs from a missing one: the run must not start anew, nor from an older checkpoint.
TEST(Checkpoint, UnreadableCheckpointIsAnError) {
  const auto expect_resource = [](const std::string& run, const std::string& word) -> std::string {
    try {
      WholeStore(run, 3).load_newest_valid(nullptr);
      return "nothing was raised";
    } catch (const Error& e) {
      const std::string text = e.what();
      return e.kind() == ErrorKind::kResource && text.find(word) != std::string::npos ? "" : text;
    }
  };
  const std::string run = fresh_run("unreadable");
  fs::create_symlink("checkpoints", run + "/checkpoints");  // to itself, which nobody can follow
  EXPECT_EQ(expect_resource(run, "/checkpoints cannot be read: "), "");
  fs::remove(run + "/checkpoints");

  WholeStore store(run, 3);
  store.store().require_writable();
  store.save(state_of(1));
  store.store().require_writable();
  fs::permissions(run + "/checkpoints", fs::perms::owner_read | fs::perms::owner_exec);
  in_child([&]() -> std::string {
    give_up_file_powers();
    try {
      store.store().require_writable();
      return "nothing was raised";
    } catch (const Error& e) {
      return e.kind() == ErrorKind::kResource ? "" : e.what();
    }
  });
  fs::permissions(run + "/checkpoints", fs::perms::owner_all);
  const std::string newest = store.save(state_of(2));
  for (const std::string& path :
       {newest + "/manifest.json", newest + "/model.safetensors", newest, run + "/checkpoints"}) {
    fs::permissions(path, fs::perms::none);
    in_child([&] {
      give_up_file_powers();
      return expect_resource(run, "cannot be read: Permission denied");
    });
    fs::permissions(path, fs::perms::owner_all);
  }
  std::vector<std::string> skipped;
  EXPECT_EQ(store.load_newest_valid(&skipped)->state.step, 2);
}

TEST(Checkpoint, LoadsAGivenStepOrReportsItMissing) {
  const std::string run = fresh_run("of_step");
  WholeStore store(run, 3);
  const auto failure = [&](int64_t step) { return error_text(ErrorKind::kInput, [&] { store.load(step); }); };
  EXPECT_EQ(failure(2), "[checkpoint] " + store.store().folder() + " holds no checkpoint of step 2; it holds none");
  for (const int64_t step : {2, 4, 6}) store.save(state_of(step));
  EXPECT_TRUE(same(store.load(4), state_of(4)));
  EXPECT_EQ(store.load(6, CheckpointPart::kModel).state.step, 6);
  EXPECT_EQ(failure(5), "[checkpoint] " + store.store().folder() +
                            " holds no checkpoint of step 5; it holds those of steps 2, 4, 6");
  // If a step was written twice, the newer copy is loaded unless it is damaged.
  const std::string older = run + "/checkpoints/step-00000006", newer = older + "-2";
  fs::copy(older, newer);
  fs::resize_file(newer + "/model.safetensors", 100);
  EXPECT_TRUE(same(store.load(6), state_of(6)));
  fs::resize_file(older + "/model.safetensors", 100);
  EXPECT_NE(failure(6).find(newer), std::string::npos) << failure(6);
}

TEST(Checkpoint, KeepsOnlyTheNewest) {
  const std::string run = fresh_run("keep");
  WholeStore store(run, 2);
  for (int64_t step = 10; step <= 50; step += 10) store.save(state_of(step));
  EXPECT_EQ(names(run), (std::vector<std::string>{"step-00000040", "step-00000050"}));
  // Steps with more digits still sort correctly.
  store.save(state_of(123456789));
  EXPECT_TRUE(same(*store.load_newest_valid(nullptr), state_of(123456789)));
}

TEST(Checkpoint, LoadsTheModelWithoutTheOptimizer) {
  const std::string run = fresh_run("model");
  WholeStore store(run, 2);
  const std::string folder = store.save(state_of(3));
  fs::remove(folder + "/optimizer.safetensors");
  EXPECT_FALSE(store.load_newest_valid(nullptr));
  const auto model = store.load_newest_valid(nullptr, CheckpointPart::kModel);
  ASSERT_TRUE(model);
  EXPECT_EQ(model->tensors.size(), 2u);
  EXPECT_EQ(model->state.extra.at("seed"), "3");
}

TEST(Checkpoint, SkipsDamagedCheckpointsAndDoesNotCountThem) {
  const std::string run = fresh_run("damaged");
  {
    WholeStore store(run, 2);
    store.save(state_of(1));
    store.save(state_of(2));
  }
  flip(run + "/checkpoints/step-00000002/model.safetensors",
       fs::file_size(run + "/checkpoints/step-00000002/model.safetensors") - 1, 3);
  WholeStore store(run, 2);
  std::vector<std::string> skipped;
  EXPECT_TRUE(same(*store.load_newest_valid(&skipped), state_of(1)));
  ASSERT_EQ(skipped.size(), 1u);
  EXPECT_NE(skipped[0].find("step-00000002"), std::string::npos) << skipped[0];
  EXPECT_NE(skipped[0].find("checksum of tensor"), std::string::npos) << skipped[0];
  // The run continues from step 1: step 2 is written again in place of the damaged one, and step 1 still counts.
  store.save(state_of(2));
  EXPECT_EQ(names(run), (std::vector<std::string>{"step-00000001", "step-00000002-2"}));
  EXPECT_TRUE(same(*store.load_newest_valid(&skipped), state_of(2)));
  store.save(state_of(3));
  EXPECT_EQ(names(run), (std::vector<std::string>{"step-00000002-2", "step-00000003"}));
  // The same holds in a process that has read nothing before: it must check by itself.
  flip(run + "/checkpoints/step-00000003/optimizer.safetensors", 100, 0);
  WholeStore(run, 2).save(state_of(4));
  EXPECT_EQ(names(run), (std::vector<std::string>{"step-00000002-2", "step-00000003", "step-00000004"}));
}

TEST(Checkpoint, RefusesNestedManifestsAndRepeatedKeys) {
  for (const auto& [manifest, why] : {std::pair<std::string, std::string>{R"({"step": 1, "step": 2})", "twice"},
                                      {"{\"a\": " + std::string(100000, '['), "nested too deeply"}}) {
    const std::string run = fresh_run("manifest");
    WholeStore store(run, 2);
    std::ofstream(store.save(state_of(1)) + "/manifest.json") << manifest;
    std::vector<std::string> skipped;
    EXPECT_FALSE(store.load_newest_valid(&skipped));
    ASSERT_EQ(skipped.size(), 1u);
    EXPECT_NE(skipped[0].find(why), std::string::npos) << skipped[0];
  }
}

TEST(Checkpoint, SavingAStepAgainReplacesIt) {
  const std::string run = fresh_run("twice");
  WholeStore store(run, 3);
  store.save(state_of(5));
  WholeState other = state_of(5);
  other.state.extra["seed"] = "other";
  store.save(other);
  EXPECT_EQ(names(run), (std::vector<std::string>{"step-00000005-2"}));
  EXPECT_TRUE(same(*store.load_newest_valid(nullptr), other));
}

TEST(Checkpoint, NextSaveRemovesLeftovers) {
  const std::string run = fresh_run("leftover");
  WholeStore store(run, 2);
  store.save(state_of(1));
  fs::create_directories(run + "/checkpoints/.tmp-step-00000002");
  put(run + "/checkpoints/.tmp-step-00000002/model.safetensors", "half");
  std::vector<std::string> skipped;
  EXPECT_TRUE(same(*store.load_newest_valid(&skipped), state_of(1)));
  EXPECT_TRUE(skipped.empty());
  store.save(state_of(2));
  EXPECT_EQ(names(run), (std::vector<std::string>{"step-00000001", "step-00000002"}));
}

TEST(Checkpoint, DetectsFlippedBitsAndTruncation) {
  const std::string run = fresh_run("flips");
  WholeStore store(run, 2);
  store.save(state_of(1));
  const std::string folder = store.save(state_of(2));
  for (const std::string file : {"manifest.json", "model.safetensors", "optimizer.safetensors"}) {
    const std::string path = folder + "/" + file;
    const std::string good = content(path);
    for (size_t at = 0; at < good.size(); ++at) {
      flip(path, at, static_cast<int>(at % 8));
      std::vector<std::string> skipped;
      const auto state = store.load_newest_valid(&skipped);
      ASSERT_TRUE(state);
      // A flip between the manifest's words may leave its meaning, and then its checksum, as they were.
      const bool harmless = file == "manifest.json" && skipped.empty() && same(*state, state_of(2));
      if (!harmless) {
        ASSERT_EQ(skipped.size(), 1u) << file << " byte " << at;
        ASSERT_TRUE(same(*state, state_of(1))) << file << " byte " << at;
        ASSERT_NE(skipped[0].find(folder), std::string::npos) << skipped[0];
      }
      put(path, good);
    }
    for (size_t bytes = 0; bytes < good.size(); bytes += 7) {
      fs::resize_file(path, bytes);
      ASSERT_TRUE(same(*store.load_newest_valid(nullptr), state_of(1))) << file << " cut to " << bytes;
      put(path, good);
    }
    put(path, good + "x");
    EXPECT_TRUE(same(*store.load_newest_valid(nullptr), state_of(1))) << file;
    fs::remove(path);
    EXPECT_TRUE(same(*store.load_newest_valid(nullptr), state_of(1))) << file;
    put(path, good);
  }
  EXPECT_TRUE(same(*store.load_newest_valid(nullptr), state_of(2)));
}

TEST(Checkpoint, DetectsSwappedFiles) {
  const std::string run = fresh_run("swapped");
  WholeStore store(run, 3);
  const std::string one = store.save(state_of(1));
  const std::string two = store.save(state_of(2));
  fs::copy_file(one + "/model.safetensors", two + "/model.safetensors", fs::copy_options::overwrite_existing);
  EXPECT_TRUE(same(*store.load_newest_valid(nullptr), state_of(1)));
  fs::rename(one, run + "/checkpoints/step-00000009");
  std::vector<std::string> skipped;
  EXPECT_FALSE(store.load_newest_valid(&skipped));
  EXPECT_EQ(skipped.size(), 2u);
}

TEST(Checkpoint, ReaderOfALiveRunAlwaysFindsACheckpoint) {
  const std::string run = fresh_run("live");
  WholeStore(run, 1).save(state_of(0));
  std::atomic<bool> ended = false;
  std::thread writer([&] {
    WholeStore store(run, 1);
    for (int64_t step = 1; step <= 100; ++step) store.save(state_of(step));
    ended = true;
  });
  int64_t last = 0;
  while (!ended) {
    const auto state = WholeStore(run, 1).load_newest_valid(nullptr);
    EXPECT_TRUE(state);
    if (!state) break;
    EXPECT_TRUE(same(*state, state_of(state->state.step)));
    EXPECT_GE(state->state.step, last);
    last = state->state.step;
  }
  writer.join();
}

// What is saved before step 3, and how many are kept.
struct Before {
  std::vector<int64_t> steps;
  int64_t keep;
};

// After a fault at any operation of saving step 3, the newest valid checkpoint is the previous one or step 3, complete,
// and the next process saves and cleans up. A completed save survives a power failure.
void expect_old_or_new(FaultyFiles::Fault fault, const Before& given) {
  using Fault = FaultyFiles::Fault;
  const int64_t newest_before = given.steps.empty() ? -1 : given.steps.back();
  const std::string before = fresh_run("before");
  for (const int64_t step : given.steps) WholeStore(before, given.keep).save(state_of(step));
  bool failed = true;
  bool seen_old = false;
  bool seen_new = false;
  for (int at = 0; failed; ++at) {
    ASSERT_LT(at, 1000);
    const std::string run = ::testing::TempDir() + "/faults";
    fs::remove_all(run);
    fs::copy(before, run, fs::copy_options::recursive);
    FaultyFiles files(fault, at);
    bool saved = false;
    try {
      WholeStore(run, given.keep, files).save(state_of(3));
      saved = true;
      files.lose_power();
    } catch (const Error& error) {
      // The end of the process is simulated by an exception of a type that the store does not know.
      ASSERT_EQ(error.kind(), fault == Fault::kFull ? ErrorKind::kResource : ErrorKind::kInternal) << error.what();
    }
    failed = files.failed();
    ASSERT_EQ(saved, !failed);
    std::vector<std::string> skipped;
    WholeStore store(run, given.keep);
    const auto state = store.load_newest_valid(&skipped);
    const int64_t found = state ? state->state.step : -1;
    ASSERT_TRUE(found == newest_before || found == 3) << "operation " << at << ": step " << found;
    if (state) {
      ASSERT_TRUE(same(*state, state_of(found)));
      expect_whole(run);
    }
    ASSERT_TRUE(skipped.empty()) << skipped[0];
    (found == 3 ? seen_new : seen_old) = true;
    if (saved) {
      ASSERT_EQ(found, 3);
    }
    store.save(state_of(4));
    std::vector<std::string> expected{"step-00000004"};
    if (given.keep == 2 && state) expected.insert(expected.begin(), "step-0000000" + std::to_string(found));
    ASSERT_EQ(names(run), expected) << "operation " << at;
  }
  EXPECT_TRUE(seen_old);
  EXPECT_TRUE(seen_new);
}

TEST(Checkpoint, EveryFaultLeavesTheOldOrTheNewCheckpoint) {
  using Fault = FaultyFiles::Fault;
  for (const Fault fault : {Fault::kFull, Fault::kDeath, Fault::kPower, Fault::kNames}) {
    for (const Before& before : {Before{{1, 2}, 2}, Before{{2}, 1}, Before{{}, 1}}) {
      SCOPED_TRACE("fault " + std::to_string(static_cast<int>(fault)) + ", " + std::to_string(before.steps.size()) +
                   " checkpoints before");
      expect_old_or_new(fault, before);
    }
  }
}

RC_GTEST_PROP(CheckpointProperty, HeavyDamageNeverCrashes, ()) {
  const std::string run = fresh_run("heavy");
  WholeStore store(run, 2);
  store.save(state_of(1));
  const std::string folder = store.save(state_of(2));
  for (int n = *rc::gen::inRange(1, 4); n > 0; --n) {
    const std::string path =
        folder + "/" + *rc::gen::element<std::string>("manifest.json", "model.safetensors", "optimizer.safetensors");
    std::string bytes = content(path);
    const auto at = *rc::gen::inRange<size_t>(0, bytes.size() + 1);
    const auto piece = *rc::gen::container<std::string>(rc::gen::arbitrary<char>());
    bytes.replace(at, *rc::gen::inRange<size_t>(0, 40), piece);
    put(path, bytes);
  }
  const auto state = store.load_newest_valid(nullptr);
  RC_ASSERT(state.has_value());
  RC_ASSERT(same(*state, state_of(state->state.step)));
}

}  // namespace
}  // namespace annulus::checkpoint_test
