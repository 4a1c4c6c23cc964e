// Tests of runtime/inference/sampler.h: generating text from a run.
#include "runtime/inference/sampler.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "common/error.h"
#include "runtime/tensor_files/block_map_file.h"
#include "tests/runtime/training/tiny_run.h"
#include "tests/runtime/training/trainer_runs.h"

namespace annulus::sampler_test {
namespace {

TEST(Sampler, SameSeedGivesTheSameText) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.run.steps = 40;
  train(config, 1);
  const auto sample = [&](SampleOptions o) {
    std::ostringstream out;
    std::ostringstream notes;
    o.root = folder.path() + "/runs";
    o.run = "tiny-001";
    o.out = &out;
    o.notes = &notes;
    EXPECT_EQ(run_sample(o), 0);
    return out.str();
  };
  const std::string a = sample({.prompt = "def ", .tokens = 100});
  EXPECT_EQ(a.substr(0, 4), "def ");
  EXPECT_EQ(a, sample({.prompt = "def ", .tokens = 100}));
  EXPECT_NE(a, sample({.prompt = "def ", .tokens = 100, .seed = 2}));
  EXPECT_EQ(sample({.prompt = "", .tokens = 0}), "");
  EXPECT_GE(sample({.prompt = "", .tokens = 200, .temperature = 0}).size(), 200U) << "longer than the context of 64";
  EXPECT_THROW(sample({.prompt = "x", .tokens = -1}), Error);
  EXPECT_THROW(sample({.prompt = "x", .temperature = -1}), Error);
  EXPECT_THROW(run_sample({.run = "nothing", .root = folder.path() + "/runs"}), Error);
}

// In a pipe or file the text is the bytes of the model, and nothing else.
TEST(Sampler, OnlyATerminalGetsReplacedBytes) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.run.steps = 1;
  train(config, 1);
  const std::string prompt = "a\xff\r\x1b[2J\xe4\xb8";
  const auto sample = [&](bool terminal, int64_t tokens) {
    std::ostringstream out;
    EXPECT_EQ(run_sample({.run = folder.path() + "/runs/tiny-001",
                          .prompt = prompt,
                          .tokens = tokens,
                          .temperature = 5,
                          .terminal = terminal,
                          .out = &out}),
              0);
    return out.str();
  };
  EXPECT_EQ(sample(false, 0), prompt);
  EXPECT_EQ(sample(false, 50).size(), prompt.size() + 50);
  EXPECT_EQ(sample(true, 0), "a\uFFFD\uFFFD\uFFFD[2J\uFFFD\n");
}

TEST(Sampler, EndsBeforeAStopString) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.run.steps = 40;
  train(config, 1);
  const auto sample = [&](std::vector<std::string> stop) {
    std::ostringstream out;
    SampleOptions o{.run = folder.path() + "/runs/tiny-001", .prompt = "def ", .tokens = 120};
    o.stop = std::move(stop);
    o.out = &out;
    EXPECT_EQ(run_sample(o), 0);
    return out.str();
  };
  const std::string all = sample({});
  // Three characters from the middle, and the place where they first occur after the prompt.
  const std::string stop = all.substr(60, 3);
  const size_t end = all.find(stop, 4);
  EXPECT_EQ(sample({stop, "never to be seen"}), all.substr(0, end));
  EXPECT_EQ(sample({stop + "\x01"}), all) << "text held back for a partial match is written at the end";
  EXPECT_THROW(sample({""}), Error);
}

TEST(Sampler, UsesTheCheckpointOfTheGivenStep) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.checkpoint.every = 3;
  train(config, 1);
  const auto sample = [&](std::optional<int64_t> step) {
    std::ostringstream out;
    EXPECT_EQ(run_sample({.run = folder.path() + "/runs/tiny-001", .step = step, .tokens = 60, .out = &out}), 0);
    return out.str();
  };
  EXPECT_EQ(sample(6), sample(std::nullopt));
  EXPECT_NE(sample(3), sample(6));
  EXPECT_THROW(sample(4), Error);
}

// Generated text has no later keys, so that such a pattern makes sense only for training without sampling.
TEST(Trainer, WarnsAboutPatternsThatSeeLaterKeys) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.run.steps = 1;
  const std::string said = "lets a query see later keys";
  const auto run = [&](const std::vector<std::string>& patterns) {
    std::vector<PatternSpec> each;
    for (const std::string& text : patterns) each.push_back(parse_pattern(text, "test"));
    config.model.pattern = each;
    const std::string out = train(config, 2).out;
    std::ostringstream text, notes;
    EXPECT_EQ(run_sample({.run = "tiny", .root = config.run.folder, .tokens = 4, .out = &text, .notes = &notes}), 0);
    EXPECT_EQ(out.find(said) == std::string::npos, notes.str().find(said) == std::string::npos) << out << notes.str();
    return out.find(said) != std::string::npos;
  };
  EXPECT_TRUE(run({"{ kind = 'causal' }", "{ kind = 'window', left = 7, right = 1 }"}));
  EXPECT_FALSE(run({"{ kind = 'causal' }", "{ kind = 'window', left = 7, right = 0 }"}));
  EXPECT_FALSE(run({"{ kind = 'blocks', map = 'adaptive', block = 16, keep = 2, causal = true }",
                    "{ kind = 'dilated', segment_lengths = [32], dilation_rates = [2], causal = true }"}));
}

// Checkpoints of bf16 runs are fp32, those of fp64 runs fp64; any dtype computes with either.
TEST(Sampler, ContinuesAPromptOfARunInAnyDtype) {
  for (const std::string trained : {"bf16", "fp64"}) {
    const TestFolder folder;
    Config config = tiny_config(folder);
    config.model.dtype = trained;
    config.validation.every = 3;
    EXPECT_EQ(train(config, 1).code, 0);
    int validations = 0;
    for (const nlohmann::json& m : metrics(folder.path() + "/runs/tiny-001")) {
      if (!m.contains("validation_loss")) continue;
      EXPECT_LT(m["validation_loss"].get<double>(), std::log(256.0));
      ++validations;
    }
    EXPECT_EQ(validations, 2);
    for (const std::string dtype : {"fp32", "bf16", "fp64"}) {
      std::ostringstream text;
      SampleOptions options;
      options.run = folder.path() + "/runs/tiny-001";
      options.prompt = "def ";
      options.tokens = 8;
      options.dtype = dtype;
      options.out = &text;
      EXPECT_EQ(run_sample(options), 0);
      EXPECT_EQ(text.str().substr(0, 4), "def ");
      EXPECT_GT(text.str().size(), 4U);
    }
  }
}

// Documents and block maps may be listed for each row of a batch; generated text uses those of the first row.
TEST(Sampler, SamplesWithPerRowPatterns) {
  const TestFolder folder;
  const std::string file = folder.path() + "/map.safetensors";
  std::vector<uint8_t> active(4 * 4 * 4);
  for (size_t i = 0; i < active.size(); ++i) active[i] = i / 16 > i % 4 || i % 16 % 5 == 0;
  write_block_map(file, block_map_from_dense(active.data(), 16, 4, 1, 4, 4));
  Config config = tiny_config(folder);
  config.model.pattern = std::vector<PatternSpec>{
      parse_pattern("{ kind = 'causal', documents = [[64], [1, 63], [30, 34], [64]] }", "test"),
      parse_pattern("{ kind = 'blocks', map = 'file', block = 16, file = '" + file + "', causal = true }", "test")};
  train(config, 1);
  std::ostringstream out;
  EXPECT_EQ(run_sample({.run = "tiny-001", .root = folder.path() + "/runs", .tokens = 20, .out = &out}), 0);
  EXPECT_GE(out.str().size(), 20U);
}

}  // namespace
}  // namespace annulus::sampler_test
