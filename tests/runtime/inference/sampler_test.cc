// Tests of runtime/inference/sampler.h: generating text from a run.
#include "runtime/inference/sampler.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "comm/threads/threads.h"
#include "common/error.h"
#include "runtime/tensor_files/block_map_file.h"
#include "tests/runtime/training/tiny_run.h"
#include "tests/runtime/training/trainer_runs.h"

namespace annulus::sampler_test {
namespace {

// On one rank.
int run_sample(const SampleOptions& options) { return annulus::run_sample(options, *make_self_communicator(), 1); }

struct Sampled {
  std::string text, notes;
};

// Over several ranks, of which rank 0 writes.
Sampled sample_over(int ranks, SampleOptions options) {
  std::ostringstream out, notes;
  options.out = &out;
  options.notes = &notes;
  run_ranks(ranks, [&](Communicator& world) { EXPECT_EQ(annulus::run_sample(options, world, ranks), 0); });
  return {out.str(), notes.str()};
}

// Whether a note says that rounding may have decided.
bool counted_near(const Sampled& sampled) { return sampled.notes.find("that rounding may swap") != std::string::npos; }

// The text of one rank, whatever the number of ranks, the layout, and who holds the weights. In fp64 rounding decides
// nothing; in fp32 a note says where it may have.
TEST(Sampler, TheTextDoesNotDependOnTheNumberOfRanks) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.run.steps = 40;
  config.model.pattern = std::vector<PatternSpec>{
      parse_pattern("{ kind = 'causal' }", "test"),
      parse_pattern("{ kind = 'dilated', segment_lengths = [16, 64], dilation_rates = [1, 2], causal = true }",
                    "test")};
  train(config, 1);
  SampleOptions options{.run = folder.path() + "/runs/tiny-001", .prompt = "def return self", .tokens = 100};
  int equal = 0;
  for (const std::string dtype : {"fp64", "fp32"}) {
    for (const std::string cache : {"model", "bf16"}) {
      for (const double temperature : {0.0, 0.8}) {
        options.dtype = dtype;
        options.cache = cache;
        options.temperature = temperature;
        options.sharded = false;
        options.layout = std::nullopt;
        const Sampled alone = sample_over(1, options);
        EXPECT_EQ(alone.text.size(), 115U);
        EXPECT_EQ(alone.notes, "");
        for (const int ranks : {2, 3, 4}) {
          options.sharded = ranks == 3;
          if (ranks == 4) options.layout = temperature == 0 ? "auto" : "striped";
          const Sampled sampled = sample_over(ranks, options);
          const bool near = counted_near(sampled), exact = dtype == "fp64";
          EXPECT_FALSE(near && exact && cache == "model") << sampled.notes;
          // In fp64 a cached key is practically never so near to the middle of two numbers that it is rounded
          // otherwise.
          if (near && !exact) continue;
          EXPECT_EQ(sampled.text, alone.text) << dtype << ", cache " << cache << ", " << ranks << " ranks";
          ++equal;
        }
      }
    }
  }
  EXPECT_GE(equal, 12) << "in fp64 at least";
}

// What one rank alone can find out, and what all of them can, is raised on each.
TEST(Sampler, FailsOnAllRanks) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.run.steps = 1;
  config.model.pattern =
      parse_pattern("{ kind = 'blocks', map = 'adaptive', block = 16, keep = 2, causal = true }", "test");
  train(config, 1);
  const std::string run = folder.path() + "/runs/tiny-001";
  const auto refused = [&](const SampleOptions& options, ErrorKind kind, const std::string& says) {
    int ranks = 0;
    run_ranks(2, [&](Communicator& world) {
      std::ostringstream out;
      SampleOptions o = options;
      o.out = &out;
      try {
        annulus::run_sample(o, world, 2);
        ADD_FAILURE() << says;
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), kind);
        EXPECT_NE(std::string(error.what()).find(says), std::string::npos) << error.what();
      }
      world.barrier({"test"});
      if (world.rank() == 0) ranks = world.size();
    });
    EXPECT_EQ(ranks, 2);
  };
  refused({.run = run}, ErrorKind::kUsage, "generate with it on one rank");
  refused({.run = run + "nothing"}, ErrorKind::kInput, "nothing");
  refused({.run = run, .cache = "fp8"}, ErrorKind::kUsage, "--cache");
  refused({.run = run, .layout = "zigzags"}, ErrorKind::kUsage, "--layout");
  refused({.run = run, .context = 0}, ErrorKind::kUsage, "--context");
  // A cache of 2^40 positions.
  config.model.pattern = causal_pattern();
  train(config, 1);
  refused({.run = folder.path() + "/runs/tiny-002", .tokens = int64_t{1} << 40, .context = int64_t{1} << 40},
          ErrorKind::kResource, "--cache bf16");
}

TEST(Sampler, SaysThatAPromptIsLongerThanTheRowsOfTheTraining) {
  const TestFolder folder;
  Config config = tiny_config(folder);  // rows of 64
  config.run.steps = 1;
  train(config, 1);
  SampleOptions options{.run = folder.path() + "/runs/tiny-001", .prompt = std::string(70, 'a'), .tokens = 4};
  for (const int ranks : {1, 2}) {
    options.context = std::nullopt;
    EXPECT_NE(sample_over(ranks, options)
                  .notes.find("the prompt has 70 tokens, and the model reads at most 64 at once, "
                              "as in its training: only the last 32 are read"),
              std::string::npos);
    options.context = 100;
    EXPECT_NE(sample_over(ranks, options).notes.find("text of up to 74 tokens is longer than the 64 of the rows"),
              std::string::npos);
    options.prompt.resize(60);
    EXPECT_EQ(sample_over(ranks, options).notes.find("longer than"), std::string::npos);
    options.prompt.resize(70, 'a');
  }
}

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
