// Tests of the error for a run that does not fit into memory: the configuration it suggests does fit.
#include <gtest/gtest.h>

#include <sstream>
#include <string>

#include "comm/threads/threads.h"
#include "common/error.h"
#include "runtime/training/trainer.h"
#include "tests/runtime/training/tiny_run.h"

namespace annulus::trainer_memory_test {
namespace {

// The run is refused at first and trains with the suggested setting.
TEST(TrainerMemory, ErrorNamesTheNearestConfigurationThatFits) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.run.steps = 1;
  config.model.layers = 4;
  config.model.dim = 128;
  std::string said;
  std::ostringstream out;
  const auto train = [&] {
    run_ranks(2, [&](Communicator& world) {
      TrainOptions options;
      options.out = &out;
      options.ranks_here = 2;
      options.available = [] { return AvailableMemory{17'000'000, "a test"}; };
      try {
        run_training(config, world, options);
      } catch (const Error& e) {
        EXPECT_EQ(e.kind(), ErrorKind::kResource) << e.what();
        if (world.rank() == 0) said = e.what();
      }
    });
  };
  train();
  const size_t named = said.find("are free (a test): optimizer.shard = 1 fits (");
  EXPECT_NE(named, std::string::npos) << said;
  config.optimizer.shard = 1;
  said.clear();
  train();
  EXPECT_EQ(said, "") << out.str();
}

}  // namespace
}  // namespace annulus::trainer_memory_test
