// Tests of TrainOptions::on_checkpoint, by which a run tells the launcher where it could be resumed.
#include <gtest/gtest.h>

#include <filesystem>
#include <sstream>
#include <string>
#include <vector>

#include "comm/threads/threads.h"
#include "runtime/training/trainer.h"
#include "tests/runtime/training/tiny_run.h"

namespace annulus::told_checkpoints_test {
namespace {

namespace fs = std::filesystem;

TEST(Trainer, ReportsEachCheckpoint) {
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

}  // namespace
}  // namespace annulus::told_checkpoints_test
