// Tests of whole runs whose ranks share their state: checkpoints resume at every sharding level and world size, and the
// metrics report the communication that was waited for.
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/common/equal_losses.h"
#include "tests/runtime/training/tiny_run.h"
#include "tests/runtime/training/trainer_runs.h"

namespace annulus::shared_state_runs_test {
namespace {

namespace fs = std::filesystem;

TEST(SharedStateRuns, ResumesAtEveryLevelAndWorldSize) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.model.dtype = "fp64";
  config.data.batch = 12;
  config.data.context = 48;
  config.optimizer.shard = 3;
  config.checkpoint.every = 3;
  EXPECT_EQ(train(config, 4).code, 0);
  const std::string straight = folder.path() + "/runs/tiny-001";
  const std::vector<double> want = losses(straight);
  EXPECT_EQ(checkpoint_tensors(straight, 6).size(), 8U) << "each rank writes its part";
  int number = 1;
  for (const int ranks : {1, 2, 3, 4, 6}) {
    config.mesh.data = ranks == 6 ? 6 : 1;
    for (const int64_t level : {0, 1, 2, 3}) {
      config.optimizer.shard = level;
      char name[24];
      std::snprintf(name, sizeof name, "tiny-%03d", ++number);
      const std::string run = folder.path() + "/runs/" + name;
      fs::copy(straight, run, fs::copy_options::recursive);
      fs::remove_all(run + "/checkpoints/step-00000006");
      const Result r = train(config, ranks, run);
      EXPECT_EQ(r.code, 0) << r.out;
      EXPECT_NE(r.out.find("resumed after step 3"), std::string::npos) << r.out;
      const std::vector<double> got = losses(run);
      expect_equal_losses(got, want, std::to_string(ranks) + " ranks, level " + std::to_string(level));
      if (ranks == 4) {
        EXPECT_EQ(got, want) << "level " << level;
        EXPECT_EQ(checkpoint_tensors(run, 6), checkpoint_tensors(straight, 6)) << "level " << level;
      }
    }
  }
}

TEST(SharedStateRuns, ReportsExposedCommunicationByKind) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.optimizer.shard = 3;
  EXPECT_EQ(train(config, 2).code, 0);
  for (const nlohmann::json& m : metrics(folder.path() + "/runs/tiny-001")) {
    double parts = 0;
    for (const char* kind : {"ring", "reduce", "gather"}) {
      const double seconds = m.at("exposed_" + std::string(kind) + "_seconds");
      EXPECT_GE(seconds, 0) << kind;
      parts += seconds;
    }
    EXPECT_GT(parts, 0);
    EXPECT_LE(parts, m.at("exposed_communication_seconds").get<double>() * (1 + 1e-9));
  }
}

}  // namespace
}  // namespace annulus::shared_state_runs_test
