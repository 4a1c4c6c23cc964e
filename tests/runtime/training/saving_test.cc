// Tests of runs that save behind training (runtime/training/run_saves.h): their bits, their failures and their memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <future>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "comm/threads/threads.h"
#include "common/error.h"
#include "runtime/training/job.h"
#include "runtime/training/memory_plan.h"
#include "runtime/training/trainer.h"
#include "tests/common/expect_error.h"
#include "tests/common/hooked_files.h"
#include "tests/runtime/training/tiny_run.h"
#include "tests/runtime/training/trainer_runs.h"

namespace annulus::saving_test {
namespace {

namespace fs = std::filesystem;

// Trains over threads; `options` is changed by `set` on each rank.
template <typename Set>
Result trained(const Config& config, int ranks, const Set& set) {
  std::ostringstream out;
  std::atomic<int> code{0};
  run_ranks(ranks, [&](Communicator& world) {
    TrainOptions options;
    options.out = &out;
    set(options, world.rank());
    const int own = run_training(config, world, options);
    if (world.rank() == 0) code = own;
  });
  return {code, out.str()};
}

bool has_checkpoint(const std::string& run, int64_t step) {
  const std::string digits = std::to_string(step);
  return fs::exists(run + "/checkpoints/step-" + std::string(8 - digits.size(), '0') + digits);
}

// The writers are held until training has done two further steps. Whatever they read later than in the save itself
// would be another step's.
TEST(Saving, WritesTheBitsOfItsStepAndResumesFromThem) {
  for (const std::vector<std::string>& keys : {std::vector<std::string>{},
                                               {"optimizer.shard=3", "model.dtype='bf16'"},
                                               {"optimizer.offload='file'"},
                                               {"optimizer.offload='file'", "optimizer.shard=1", "model.dtype='bf16'"},
                                               {"model.dtype='fp64'"}}) {
    const TestFolder folder;
    Config config = parse_config(to_toml(tiny_config(folder)), "the test", keys);
    config.checkpoint.every = 3;
    config.checkpoint.background = false;
    const std::string name = keys.empty() ? "" : keys[0];
    EXPECT_EQ(train(config, 2).code, 0) << name;
    const std::string straight = folder.path() + "/runs/tiny-001", run = folder.path() + "/runs/tiny-002";
    config.checkpoint.background = true;

    std::promise<void> opened;
    const std::shared_future<void> gate = opened.get_future().share();
    static thread_local bool trains;  // whether this thread is that of a rank
    trains = false;
    std::atomic<int> held = 0;
    HookedFiles files([&](const std::string& operation, const std::string&) {
      if (trains || (operation != "create" && operation != "sync")) return;
      if (gate.wait_for(std::chrono::seconds(0)) != std::future_status::ready) ++held;
      gate.wait();
    });
    const Result r = trained(config, 2, [&](TrainOptions& options, int rank) {
      options.files = &files;
      trains = true;
      options.stop = [&, rank, calls = 0]() mutable {
        if (++calls == 6 && rank == 0) {  // before the last step
          EXPECT_FALSE(has_checkpoint(run, 3)) << name;
          opened.set_value();
        }
        return false;
      };
    });
    EXPECT_EQ(r.code, 0) << r.out;
    EXPECT_EQ(held, 2) << "both ranks' writers";
    EXPECT_EQ(losses(run), losses(straight)) << name;
    for (const int64_t step : {3, 6}) {
      EXPECT_EQ(checkpoint_tensors(run, step), checkpoint_tensors(straight, step)) << name << ", step " << step;
    }
    fs::remove_all(run + "/checkpoints/step-00000006");
    EXPECT_NE(train(config, 2, run).out.find("resumed after step 3"), std::string::npos) << name;
    EXPECT_EQ(losses(run), losses(straight)) << name;
    EXPECT_EQ(checkpoint_tensors(run, 6), checkpoint_tensors(straight, 6)) << name;
  }
}

// The writers of the first save are held until somebody begins the second one, for half a second at most. The second
// begins only once the first is complete under its name.
TEST(Saving, TheNextSaveWaitsForTheFirst) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.checkpoint.every = 2;
  std::mutex mutex;
  std::condition_variable changed;
  std::optional<std::chrono::steady_clock::time_point> until;
  bool published = false, second = false, too_early = false;
  HookedFiles files([&](const std::string& operation, const std::string& path) {
    std::unique_lock lock(mutex);
    if (path.find("step-00000004") != std::string::npos) {
      too_early = too_early || !published;
      second = true;
      changed.notify_all();
    } else if (path.find("step-00000002") != std::string::npos) {
      if (!until) until = std::chrono::steady_clock::now() + std::chrono::milliseconds(500);
      if (operation == "sync") changed.wait_until(lock, *until, [&] { return second; });
      published = published || (operation == "rename" && path.ends_with("step-00000002"));
    }
  });
  const Result r = trained(config, 2, [&](TrainOptions& options, int) { options.files = &files; });
  EXPECT_EQ(r.code, 0) << r.out;
  const std::string run = folder.path() + "/runs/tiny-001";
  EXPECT_TRUE(second && published);
  EXPECT_FALSE(too_early);
  for (const int64_t step : {2, 4, 6}) EXPECT_TRUE(has_checkpoint(run, step)) << step;
  EXPECT_EQ(metrics(run, "checkpoint").size(), 3U);
}

// TrainOptions::on_checkpoint, by which a run tells the launcher where it could be resumed, names only what is on the
// disk.
TEST(Saving, TellsEachCheckpoint) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.checkpoint.every = 2;
  std::ostringstream out;
  std::vector<std::string> told;
  TrainOptions options;
  options.command = {"annulus", "train", "it's.toml", "--resume"};
  options.out = &out;
  options.on_checkpoint = [&](int64_t step, const std::string& at, const std::vector<std::string>& command) {
    EXPECT_EQ(fs::exists(at + "/manifest.json"), step > 0);
    told.push_back(std::to_string(step) + (at.empty() ? "" : " " + fs::path(at).filename().string()));
    const std::vector<std::string> onward = {"annulus", "train", "it's.toml", "--resume",
                                             folder.path() + "/runs/tiny-001"};
    EXPECT_EQ(command, step == config.run.steps ? std::vector<std::string>() : onward) << "nothing is left to do";
  };
  const auto train = [&](Communicator& world) { run_training(config, world, options); };
  run_ranks(2, train);
  EXPECT_EQ(told, (std::vector<std::string>{"0", "2 step-00000002", "4 step-00000004", "6 step-00000006"}));
  told.clear();
  config.run.steps = 7;
  options.resume = "tiny-001";
  run_ranks(2, train);
  EXPECT_EQ(told, (std::vector<std::string>{"6 step-00000006", "7 step-00000007"}));
}

TEST(Saving, MetricsHaveALineForEachCheckpoint) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.checkpoint.every = 2;
  for (const bool background : {true, false}) {
    config.checkpoint.background = background;
    EXPECT_EQ(train(config, 2).code, 0);
    const auto lines = metrics(folder.path() + "/runs/tiny-00" + (background ? "1" : "2"), "checkpoint");
    ASSERT_EQ(lines.size(), 3U);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(lines[i]["step"], 2 * (i + 1));
      EXPECT_EQ(lines[i]["checkpoint"], "step-0000000" + std::to_string(2 * (i + 1)));
      const double stopped = lines[i]["checkpoint_stopped_seconds"], seconds = lines[i]["checkpoint_seconds"];
      EXPECT_GT(stopped, 0);
      if (background && i < 2) {
        EXPECT_LT(stopped, seconds);
      } else {
        EXPECT_EQ(stopped, seconds);
      }
    }
  }
}

// Fails to write files of the checkpoint of step 2.
HookedFiles full_at_step_2() {
  return HookedFiles([](const std::string& operation, const std::string& path) {
    if (operation == "create" && path.find("step-00000002/") != std::string::npos) {
      throw Error(ErrorKind::kResource, "files", "cannot write " + path + ": no space left");
    }
  });
}

TEST(Saving, FailureIsSaidAndStopsTheRunUnlessItGoesOn) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.checkpoint.every = 2;
  int number = 0;
  for (const bool background : {true, false}) {
    for (const bool goes_on : {true, false}) {
      config.checkpoint.background = background;
      config.checkpoint.on_error = goes_on ? "continue" : "stop";
      HookedFiles files = full_at_step_2();
      const auto with_files = [&](TrainOptions& options, int) { options.files = &files; };
      const std::string run = folder.path() + "/runs/tiny-00" + std::to_string(++number);
      if (goes_on) {
        const Result r = trained(config, 2, with_files);
        EXPECT_EQ(r.code, 0) << r.out;
        EXPECT_NE(r.out.find("warning: no checkpoint of step 2 could be written: on rank 0: cannot write "),
                  std::string::npos)
            << r.out;
        EXPECT_NE(r.out.find("no space left; the run goes on"), std::string::npos) << r.out;
        EXPECT_EQ(losses(run).size(), 6U);
        EXPECT_TRUE(has_checkpoint(run, 4) && has_checkpoint(run, 6));
      } else {
        expect_error(ErrorKind::kResource, {"no space left"}, [&] { trained(config, 2, with_files); });
        // Behind training the failure is said after the next step at the earliest.
        EXPECT_GE(losses(run).size(), background ? 3U : 2U);
        EXPECT_LT(losses(run).size(), background ? 5U : 3U);
        EXPECT_FALSE(has_checkpoint(run, 4));
      }
      EXPECT_FALSE(has_checkpoint(run, 2));
    }
  }
}

// The last checkpoint takes the place of one that failed meanwhile, and its own failure always stops the run.
TEST(Saving, LastCheckpointDecides) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.checkpoint.every = 2;
  config.run.steps = 3;
  HookedFiles files = full_at_step_2();
  const Result r = trained(config, 1, [&](TrainOptions& options, int) { options.files = &files; });
  EXPECT_EQ(r.code, 0) << r.out;
  EXPECT_NE(r.out.find("no checkpoint of step 2 could be written"), std::string::npos) << r.out;
  EXPECT_TRUE(has_checkpoint(folder.path() + "/runs/tiny-001", 3));
  config.run.steps = 2;
  config.checkpoint.on_error = "continue";
  expect_error(ErrorKind::kResource, {"no space left"},
               [&] { trained(config, 1, [&](TrainOptions& options, int) { options.files = &files; }); });
}

// A run that ends because its updates are left out still has the checkpoint of the last update.
TEST(Saving, RunThatFailsWaitsForTheCheckpointUnderWay) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.run.steps = 1000;
  config.checkpoint.every = 1;
  config.optimizer.skips = 2;
  config.optimizer.spike = 1.000001;  // two norms above the last one that was applied end the run
  config.optimizer.spike_window = 1;
  expect_error(ErrorKind::kUsage, {"2 steps in a row"}, [&] { train(config, 2); });
  const std::string run = folder.path() + "/runs/tiny-001";
  EXPECT_TRUE(has_checkpoint(run, static_cast<int64_t>(losses(run).size()) - 1));
}

TEST(Saving, CopiesOnlyWhereThereIsMemory) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.checkpoint.every = 3;
  std::vector<int64_t> needed(2);
  run_ranks(2, [&](Communicator& world) {  // a plan depends on the threads of its rank
    const MemoryPlan plan = plan_memory(config, check_training(config, 2), make_sharding(config, 2, 2), 2, world.rank(),
                                        RanksAre::kProcesses);
    needed[static_cast<size_t>(world.rank())] = 2 * (plan.total() + plan.save_copy);
  });
  for (const bool fits : {true, false}) {
    const int64_t bytes = fits ? std::max(needed[0], needed[1]) : std::min(needed[0], needed[1]) - 1;
    const Result r = trained(config, 2, [&](TrainOptions& options, int) {
      options.ranks_here = 2;
      options.available = [&] { return AvailableMemory{bytes, "of this test"}; };
    });
    EXPECT_EQ(r.code, 0) << r.out;
    EXPECT_EQ(r.out.find("training waits while a checkpoint is written") == std::string::npos, fits) << r.out;
    EXPECT_EQ(r.out.find("; a checkpoint is written from a copy of ") != std::string::npos, fits) << r.out;
    const nlohmann::json line = metrics(folder.path() + "/runs/tiny-00" + (fits ? "1" : "2"), "checkpoint")[0];
    EXPECT_EQ(line["step"], 3);
    EXPECT_EQ(line["checkpoint_stopped_seconds"] == line["checkpoint_seconds"], !fits);
  }
}

TEST(Saving, PlanCountsWhatIsCopied) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  const auto copy = [&](int ranks) {
    return plan_memory(config, check_training(config, ranks), make_sharding(config, ranks, ranks), ranks, 0,
                       RanksAre::kProcesses)
        .save_copy;
  };
  EXPECT_EQ(copy(2), 0) << "no checkpoint before the end";
  config.checkpoint.every = 1;
  const int64_t whole = copy(1), half = copy(2);
  const auto state = static_cast<double>(12 * parameter_count(model_shape(config)));
  EXPECT_GE(static_cast<double>(whole), state);
  EXPECT_LT(static_cast<double>(whole), 1.01 * state);
  EXPECT_EQ(2 * half, whole) << "each rank writes its part, at every level";
  config.optimizer.offload = "file";
  EXPECT_EQ(copy(2), half / 3) << "moments lie in files";
  config.model.dtype = "bf16";
  EXPECT_EQ(copy(2), 0) << "master weights, too";
  config.optimizer.offload = "none";
  EXPECT_EQ(copy(2), half);
  config.checkpoint.background = false;
  EXPECT_EQ(copy(2), 0);
}

}  // namespace
}  // namespace annulus::saving_test
