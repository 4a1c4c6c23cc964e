// Tests of the spike rule in whole runs: which updates are left out, what a rewind to a checkpoint does, and that an
// interrupted run resumes bit-identically.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "comm/threads/threads.h"
#include "common/error.h"
#include "runtime/run/checkpoint.h"
#include "runtime/tensor_files/safetensors.h"
#include "runtime/training/trainer.h"
#include "runtime/training/training.h"
#include "tests/common/expect_error.h"
#include "tests/runtime/training/kept_state.h"
#include "tests/runtime/training/tiny_run.h"
#include "tests/runtime/training/trainer_runs.h"

namespace annulus::spikes_test {
namespace {

constexpr int64_t kSteps = 24;

// Most rows are words; a few are noise, which has larger gradients.
Config noisy_config(const TestFolder& folder) {
  Config c = tiny_config(folder);
  std::string noise;
  uint32_t state = 99;
  for (int i = 0; i < 2000; ++i) {
    state = state * 1664525 + 1013904223;
    noise += static_cast<char>('!' + (state >> 24) % 90);
  }
  const std::string file = folder.path() + "/noise.txt";
  std::ofstream(file, std::ios::binary) << noise;
  c.data.train = {folder.path() + "/text.txt", file};
  c.data.validation_fraction = 0;
  c.data.batch = 2;
  c.run.steps = kSteps;
  c.optimizer.spike = 1.3;
  c.optimizer.spike_window = 4;
  c.checkpoint = {.every = 3, .keep = 100};
  return c;
}

TrainingState state_of(const std::string& run) { return CheckpointStore(run, 100).open(kSteps); }

// Expects that the norms and medians in metrics.jsonl follow the rule; returns the number of spikes.
int64_t expect_the_rule(const Config& config, const std::string& run) {
  std::deque<double> window;
  int64_t spikes = 0;
  for (const nlohmann::json& m : metrics(run)) {
    std::optional<double> median;
    if (static_cast<int64_t>(window.size()) == config.optimizer.spike_window) {
      std::vector<double> sorted(window.begin(), window.end());
      std::sort(sorted.begin(), sorted.end());
      median = (sorted[1] + sorted[2]) / 2;
    }
    EXPECT_EQ(m["gradient_norm_median"].is_null(), !median) << m;
    if (median) {
      EXPECT_EQ(m["gradient_norm_median"].get<double>(), *median);
    }
    const double norm = m["gradient_norm"];
    if (median && norm > config.optimizer.spike * *median) {
      ++spikes;
    } else {
      window.push_back(norm);
      if (window.size() > 4) window.pop_front();
    }
    EXPECT_EQ(m["spikes_left_out"], spikes);
  }
  return spikes;
}

// Stops runs in two ways at several steps and resumes them; each must end with the tensors and losses of `straight`.
void expect_same_after_stops(Config config, const std::string& straight) {
  const TrainingState want = state_of(straight);
  for (const int ranks : {2}) {
    for (const int stop_at : {5, 8, 11, 14, 20}) {
      for (const bool killed : {false, true}) {
        config.run.name = "stopped" + std::to_string(stop_at) + (killed ? "k" : "s");
        const std::string run = config.run.folder + "/" + config.run.name + "-001";
        config.checkpoint.background = !killed;  // a run that dies has no use for what it was still writing
        if (killed) {
          run_ranks(ranks, [&](Communicator& world) {
            std::ostringstream out;
            int calls = 0;
            TrainOptions options;
            options.out = &out;
            options.stop = [&]() -> bool {
              if (++calls == stop_at) throw Error(ErrorKind::kComm, "test", "a rank is gone");
              return false;
            };
            EXPECT_THROW(run_training(config, world, options), Error);
          });
        } else {
          EXPECT_EQ(train(config, ranks, std::nullopt, stop_at).code, 143);
        }
        const Result resumed = train(config, ranks, run);
        EXPECT_EQ(resumed.code, 0) << resumed.out;
        EXPECT_EQ(losses(run), losses(straight)) << stop_at << (killed ? ", killed" : "");
        EXPECT_EQ(checkpoint_tensors(run, kSteps), checkpoint_tensors(straight, kSteps));
        EXPECT_EQ(state_of(run).extra, want.extra);
      }
    }
  }
}

TEST(Spikes, SkipFollowsTheRuleAndResumesBitIdentically) {
  const TestFolder folder;
  const Config config = noisy_config(folder);
  const Result r = train(config, 2);
  const std::string run = config.run.folder + "/tiny-001";
  ASSERT_EQ(r.code, 0) << r.out;
  const int64_t spikes = expect_the_rule(config, run);
  EXPECT_GE(spikes, 2) << r.out;
  EXPECT_NE(r.out.find(" is above 1.3 times its running median "), std::string::npos) << r.out;
  EXPECT_NE(r.out.find(", so this update is left out"), std::string::npos) << r.out;
  EXPECT_EQ(state_of(run).extra.at("updates"), std::to_string(kSteps - spikes));
  expect_same_after_stops(config, run);
}

TEST(Spikes, RewindLeavesOutTheirRowsAndResumesBitIdentically) {
  const TestFolder folder;
  Config config = noisy_config(folder);
  config.optimizer.spike_action = "rewind";
  const Result r = train(config, 2);
  const std::string run = config.run.folder + "/tiny-001";
  ASSERT_EQ(r.code, 0) << r.out;
  EXPECT_NE(r.out.find("; back to the checkpoint of step "), std::string::npos) << r.out;
  EXPECT_NE(r.out.find(", leaving out the 2 rows of this step"), std::string::npos) << r.out;
  const TrainingState state = state_of(run);
  EXPECT_EQ(state.extra.at("updates"), std::to_string(kSteps)) << "every step has its update";
  const nlohmann::json left_out = nlohmann::json::parse(state.extra.at("data")).at("left_out");
  ASSERT_GE(left_out.size(), 1U);
  EXPECT_EQ(losses(run).size(), static_cast<size_t>(kSteps)) << "each step is there once";
  const nlohmann::json end = metrics(run).back();
  EXPECT_EQ(end["rows_left_out"], 2 * left_out.size());
  EXPECT_EQ(end["sources"]["train"]["rows"], 2 * kSteps);
  EXPECT_EQ(end["spikes_left_out"], 0);
  int64_t returns = 0;
  bool after_return = false;
  for (const nlohmann::json& m : metrics(run)) {
    if (after_return &&
        m.contains("loss")) {  // what this line could have left out may have stood in lines that are gone
      for (const char* key : {"caches", "plans_made", "targets_share"}) EXPECT_TRUE(m.contains(key)) << key << m;
      after_return = false;
    }
    if (m.contains("rewound_from")) ++returns, after_return = true;
  }
  EXPECT_GE(returns, 1);
  expect_same_after_stops(config, run);

  // Training without those rows and without the rule gives the same weights.
  config.optimizer.spike = 0;
  Dataset data(config.data, config.run.seed, config.model.vocab);
  for (const nlohmann::json& rows : left_out) {
    // The recorded places count the rows that were left out before them, so the step is that much earlier.
    data.leave_out(rows.at("first").get<int64_t>() / 2 - data.rows_left_out() / 2);
  }
  KeptState kept;
  run_ranks(2, [&](Communicator& world) {
    Training training(config, world, data, at::kCPU);
    while (training.steps_done() < kSteps) training.step();
    keep_together(kept, training, world);
  });
  const CheckpointStore::Entry entry = CheckpointStore(run, 100).newest_first(kSteps).front();
  int64_t compared = 0;
  for (const auto& file : std::filesystem::directory_iterator(entry.path)) {
    if (file.path().extension() != ".safetensors") continue;
    const SafetensorsFile saved(file.path().string());
    for (const TensorInfo& t : saved.tensors()) {
      const auto found = kept.tensors.find(t.name);
      if (found == kept.tensors.end()) continue;  // the file holds only a part of this tensor
      EXPECT_TRUE(saved.load(t.name).equal(found->second)) << t.name;
      ++compared;
    }
  }
  EXPECT_GE(compared, 10);
}

TEST(Spikes, RewindWithoutACheckpointSkips) {
  const TestFolder folder;
  Config config = noisy_config(folder);
  config.checkpoint.every = 0;
  const Result skipped = train(config, 1);
  config.optimizer.spike_action = "rewind";
  const Result r = train(config, 1);
  EXPECT_NE(r.out.find("; there is no checkpoint to return to, so this update is left out"), std::string::npos)
      << r.out;
  EXPECT_EQ(losses(config.run.folder + "/tiny-001"), losses(config.run.folder + "/tiny-002"));
}

// By this rule nearly every norm is a spike, whatever the rows are.
TEST(Spikes, RepeatedSpikesAtTheSameStepEndTheRun) {
  const TestFolder folder;
  Config config = noisy_config(folder);
  config.optimizer.spike = 1.000001;
  config.optimizer.spike_window = 1;
  config.optimizer.skips = 3;
  for (const std::string action : {"skip", "rewind"}) {
    config.optimizer.spike_action = action;
    config.run.name = action;
    run_ranks(2, [&](Communicator& world) {
      std::ostringstream out;
      TrainOptions options;
      options.out = &out;
      expect_error(ErrorKind::kUsage, {"above optimizer.spike times its running median in 3 steps in a row"},
                   [&] { run_training(config, world, options); });
    });
  }
}

}  // namespace
}  // namespace annulus::spikes_test
