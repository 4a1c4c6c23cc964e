// Tests of what a run does with the memory that is free: `auto` takes the fastest attention that fits, and the error
// for a run that does not fit suggests a configuration that does.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "attention/plan/choice.h"
#include "comm/hosts.h"
#include "comm/threads/threads.h"
#include "common/error.h"
#include "runtime/training/job.h"
#include "runtime/training/layer_requests.h"
#include "runtime/training/memory_plan.h"
#include "runtime/training/state/sharding.h"
#include "runtime/training/trainer.h"
#include "tests/runtime/training/tiny_run.h"
#include "tests/runtime/training/trainer_runs.h"

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

// A resume that cannot fit is refused before its checkpoint is read.
TEST(TrainerMemory, AResumeThatCannotFitReadsNoCheckpoint) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.run.steps = 1;
  const auto train = [&](int64_t bytes, std::optional<std::string> resume) {
    std::ostringstream out;
    run_ranks(1, [&](Communicator& world) {
      TrainOptions options;
      options.out = &out;
      options.resume = resume;
      options.available = [bytes] { return AvailableMemory{bytes, "a test"}; };
      run_training(config, world, options);
    });
  };
  train(1'000'000'000, std::nullopt);
  std::filesystem::remove_all(folder.path() + "/runs/tiny-001/checkpoints");
  config.run.steps = 2;
  try {
    train(1000, "tiny-001");
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kResource) << e.what();
    EXPECT_NE(std::string(e.what()).find("the run needs at least "), std::string::npos) << e.what();
  }
}

// How `auto` chooses in a run: the fastest schedule with which the whole run fits.
class AutoAttention : public ::testing::Test {
 protected:
  AutoAttention() : config_(tiny_config(folder_)) {
    config_.run.steps = 4;
    config_.checkpoint.every = 2;
    config_.checkpoint.background = false;
    config_.memory.caches = config_.memory.pool = 0;
    config_.data.context = 1024;
    config_.data.batch = 2;
    config_.model.layers = 3;
    config_.attention.machine = "h100";
    PlanRequest request = check_training(config_, kRanks)[0].layers.of_rows(0, 2)[0];
    PlanTerms terms = *request.terms;
    terms.memory = 0;
    terms.layers = config_.model.layers;
    request.terms = std::move(terms);
    choice_ = choose_plan(request);
  }

  // What a rank's plan comes to with a candidate, on the rank that needs the most.
  int64_t need(const PlanCandidate& candidate) const {
    Config c = config_;
    c.attention.schedule = to_string(candidate.schedule);
    c.attention.within = candidate.within;
    int64_t most = 0;
    for (int rank = 0; rank < kRanks; ++rank) {
      most = std::max(most, plan_memory(c, check_training(c, kRanks), make_sharding(c, kRanks, kRanks), kRanks, rank,
                                        RanksAre::kProcesses)
                                .total());
    }
    return most;
  }

  // Trains where a rank has so many bytes, but for the last one, which has `last`.
  std::string train(const Config& config, int64_t bytes, int64_t last, std::optional<std::string> resume = {}) const {
    std::ostringstream out;
    run_ranks(kRanks, [&](Communicator& world) {
      TrainOptions options;
      options.out = &out;
      options.resume = resume;
      const bool is_last = world.rank() + 1 == world.size();
      options.available = [&, is_last] { return AvailableMemory{is_last ? last : bytes, "a test"}; };
      EXPECT_EQ(run_training(config, world, options), 0);
    });
    return out.str();
  }

  static bool says(const std::string& out, const std::string& what) { return out.find(what) != std::string::npos; }
  static std::string chosen_line(const PlanCandidate& candidate) {
    return "attention of rows of 1,024 tokens: " + candidate.name() + ", ";
  }

  static constexpr int kRanks = 4;
  static constexpr int64_t kPlenty = 1'000'000'000;
  static constexpr int64_t kLack = 100'000;  // more than the ranks' plans differ by
  const TestFolder folder_;
  Config config_;
  PlanChoice choice_;
};

TEST_F(AutoAttention, TakesTheFastestThatFitsTheRankWithTheLeast) {
  config_.run.steps = 1;
  const PlanCandidate fastest = choice_.chosen();
  const std::string plenty = train(config_, kPlenty, kPlenty);
  EXPECT_TRUE(says(plenty, chosen_line(fastest))) << plenty;
  EXPECT_FALSE(says(plenty, "more than is free")) << plenty;

  // Too few for it, on one rank.
  const int64_t little = need(fastest) - kLack;
  while (need(choice_.chosen()) > little) ASSERT_TRUE(choice_.refuse("it does not fit"));
  ASSERT_NE(choice_.chosen().name(), fastest.name());
  const std::string out = train(config_, kPlenty, little);
  EXPECT_TRUE(says(out, chosen_line(choice_.chosen()))) << out;
  EXPECT_TRUE(says(out, "; " + fastest.name() + ": with it the run would take ")) << out;
  // As much as the step takes is left to caches and pool.
  config_.memory.caches = config_.memory.pool = 1024;
  EXPECT_TRUE(says(train(config_, kPlenty, 2 * need(fastest) - 2 * kLack), chosen_line(choice_.chosen())));
  EXPECT_TRUE(says(train(config_, kPlenty, 2 * need(fastest)), chosen_line(fastest)));
}

// What is free when a run is resumed changes nothing, unless the run would not fit.
TEST_F(AutoAttention, AResumedRunKeepsWhatItHad) {
  const int64_t little = need(choice_.chosen()) - kLack;
  const PlanCandidate fastest = choice_.chosen();
  while (need(choice_.chosen()) > little) ASSERT_TRUE(choice_.refuse("it does not fit"));
  const std::string runs = config_.run.folder + "/";
  for (const bool documents : {false, true}) {
    Config c = config_;
    c.data.documents = documents;
    if (documents) c.attention.layout = "auto";
    c.run.name = documents ? "documents" : "rows";
    const std::string whole = c.run.name + "-001", part = c.run.name + "-002";
    train(c, little, little);
    c.run.steps = 2;
    train(c, little, little);
    c.run.steps = 4;
    const std::string resumed = train(c, kPlenty, kPlenty, part);
    const std::string had = documents ? "attention of rows of 1,024 tokens: " : chosen_line(choice_.chosen());
    EXPECT_TRUE(says(resumed, had)) << resumed;
    EXPECT_TRUE(says(resumed, ", as before the resume")) << resumed;

    EXPECT_EQ(checkpoint_tensors(runs + whole, 4), checkpoint_tensors(runs + part, 4)) << c.run.name;
  }
  // The user may ask for another one, by name or by another machine.
  Config c = config_;
  c.run.name = "rows", c.run.steps = 6;
  c.attention.machine = "h200";
  EXPECT_FALSE(says(train(c, kPlenty, kPlenty, "rows-001"), "as before the resume"));
  c.run.steps = 8;
  c.attention.schedule = to_string(fastest.schedule), c.attention.within = fastest.within;
  EXPECT_FALSE(says(train(c, kPlenty, kPlenty, "rows-001"), "attention of rows"));
}

TEST_F(AutoAttention, AResumedRunThatWouldNotFitChoosesAgain) {
  const PlanCandidate fastest = choice_.chosen();
  config_.run.steps = 2;
  train(config_, kPlenty, kPlenty);
  const int64_t little = need(fastest) - kLack;
  while (need(choice_.chosen()) > little) ASSERT_TRUE(choice_.refuse("it does not fit"));
  config_.run.steps = 4;
  const std::string resumed = train(config_, little, little, "tiny-001");
  EXPECT_TRUE(says(resumed, "before the resume the run would take 0.1 MB more than is free: it chooses again"))
      << resumed;
  EXPECT_TRUE(says(resumed, chosen_line(choice_.chosen()))) << resumed;
}

// What a checkpoint of another version may say.
TEST_F(AutoAttention, ARecordThatCannotBeReadIsNoAnswer) {
  const RankHosts hosts(std::vector<int>(kRanks, 0));
  const auto choose = [&](const std::string& recorded) {
    std::vector<Stage> stages = check_training(config_, kRanks);
    return choose_for_run(
        stages, config_, "cpu", hosts, [](const std::vector<Stage>&) { return 0.0; }, recorded);
  };
  const RunChoice chosen = choose("");
  EXPECT_TRUE(says(choose(chosen.record).lines.at(0), ", as before the resume"));
  std::string unknown = chosen.record;
  const std::string name(to_string(choice_.chosen().schedule));
  ASSERT_NE(unknown.find('"' + name + '"'), std::string::npos) << unknown;
  unknown.replace(unknown.find('"' + name + '"'), name.size() + 2, "\"of another version\"");
  for (const std::string& record : {unknown, std::string("no JSON")}) {
    const RunChoice again = choose(record);
    EXPECT_EQ(again.lines, chosen.lines) << record;
    EXPECT_EQ(again.record, chosen.record) << record;
  }
}

}  // namespace
}  // namespace annulus::trainer_memory_test
