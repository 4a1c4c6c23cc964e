// Tests of whole runs over threads, as `annulus train` starts them: run folder, metrics, checkpoints, interruption and
// resumption.
#include "runtime/training/trainer.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "comm/threads/threads.h"
#include "common/error.h"
#include "common/text.h"
#include "memory/caches.h"
#include "runtime/run/checkpoint.h"
#include "runtime/tensor_files/safetensors.h"
#include "tests/common/equal_losses.h"
#include "tests/common/expect_error.h"
#include "tests/runtime/training/tiny_run.h"
#include "tests/runtime/training/trainer_runs.h"

namespace annulus::trainer_test {
namespace {

namespace fs = std::filesystem;

TEST(Trainer, TrainsSavesAndPrintsTheNextCommands) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.validation.every = 3;
  config.run.folder = folder.path() + "/a user's runs";
  const Result r = train(config, 2);
  const std::string run = config.run.folder + "/tiny-001";
  EXPECT_EQ(r.code, 0);
  EXPECT_EQ(losses(run).size(), 6U);
  // The commands are quoted for a shell, whatever characters their words contain.
  const std::string sample = shell_quote({"my tools/annulus", "sample", run, "--prompt", "def "});
  const std::string evaluate = shell_quote({"my tools/annulus", "evaluate", run, "--data", "held-out"});
  const std::string onward = shell_quote({"my tools/annulus", "launch", "-n", "2", "train", "tiny.toml", "--set",
                                          "a.b=it's", "--resume", run, "--set", "run.steps=12"});
  const std::vector<std::string> expected = {"data 1 x context 2",
                                             "256 tokens a step",
                                             "memory: ",
                                             " MB planned for each rank: weights ",
                                             "evaluate:    " + evaluate + "\n",
                                             "sample:      " + sample + "\n",
                                             "bits per byte",
                                             "train on:    " + onward + "\n"};
  for (const std::string& words : expected) {
    EXPECT_NE(r.out.find(words), std::string::npos) << words << " is not in\n" << r.out;
  }
  EXPECT_EQ(r.out.find("MFU"), std::string::npos) << "utilization is reported only on GPUs";
  EXPECT_EQ(load_config(run + "/config.toml"), config);
  int validations = 0;
  for (const nlohmann::json& m : metrics(run)) validations += m.contains("validation_bits_per_byte") ? 1 : 0;
  EXPECT_EQ(validations, 2);
  EXPECT_EQ(train(config, 1).code, 0);
  EXPECT_TRUE(fs::exists(config.run.folder + "/tiny-002")) << "a second start makes a second folder";
}

// The size of the caches changes no result: plans that are not cached are made again.
TEST(Trainer, MemoryCachesBoundsCachesAndMetricsReportThem) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.memory.caches = 0;
  const Result r = train(config, 1);
  EXPECT_NE(r.out.find("in addition, caches take at most 0.0 MB"), std::string::npos) << r.out;
  config.memory.caches = 448;
  EXPECT_NE(train(config, 1).out.find("in addition, caches take at most 469.8 MB"), std::string::npos);
  EXPECT_EQ(cache_total(), int64_t{448} << 20);
  const std::string none = folder.path() + "/runs/tiny-001", some = folder.path() + "/runs/tiny-002";
  EXPECT_EQ(losses(none), losses(some));
  EXPECT_EQ(metrics(none).back()["caches"]["programs"]["bytes"], 0);
  EXPECT_GT(metrics(none).back()["caches"]["programs"]["too_large"], 0);
  const nlohmann::json programs = metrics(some).back()["caches"]["programs"];
  EXPECT_GT(programs["bytes"], 0);
  EXPECT_EQ(programs["entries"], 1);
  EXPECT_GT(programs["hits"], 0);
  EXPECT_EQ(programs["hits"], metrics(some).back()["plan_cache_hits"]);
  EXPECT_EQ(metrics(some).back()["caches"]["rotary tables"], nullptr);  // this model makes its own tables
}

// What does not change from line to line is in the first and the last line of a process, and in lines where it has
// changed.
TEST(Trainer, MetricsLeaveOutWhatHasNotChanged) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.validation.every = 0;
  EXPECT_EQ(train(config, 1).code, 0);
  const std::vector<nlohmann::json> lines = metrics(folder.path() + "/runs/tiny-001");
  ASSERT_EQ(lines.size(), 6U);
  for (const char* key : {"caches", "plans_made", "targets_share", "exposed_communication_seconds",
                          "exposed_ring_seconds", "exposed_reduce_seconds", "exposed_gather_seconds"}) {
    EXPECT_TRUE(lines.front().contains(key)) << key;
    EXPECT_TRUE(lines.back().contains(key)) << key;
    EXPECT_FALSE(lines[2].contains(key)) << key << " in " << lines[2];
  }
  for (const nlohmann::json& line : lines) {
    for (const char* key : {"loss", "gradient_norm", "learning_rate", "tokens", "tokens_per_second", "sources",
                            "exposed_planning_seconds", "exposed_data_seconds", "plan_cache_hits", "seconds"}) {
      EXPECT_TRUE(line.contains(key)) << key << " in " << line;
    }
  }
  EXPECT_GT(lines.back()["caches"]["programs"]["hits"], lines.front()["caches"]["programs"]["hits"]);

  // The numbers of all ranks are in every line, and what the process is before the first one.
  const nlohmann::json compute = lines[2]["ranks"]["compute_seconds"];
  EXPECT_EQ(lines[2]["rank_compute_seconds"], nlohmann::json::array({compute["most"]}));
  EXPECT_EQ(compute["least"], compute["median"]);
  EXPECT_EQ(lines[2]["ranks"]["tokens"],
            (nlohmann::json{{"least", 256}, {"median", 256}, {"most", 256}, {"most_rank", 0}}));
  EXPECT_FALSE(lines[2]["ranks"].contains("exposed_ring_seconds")) << "0 on all ranks";
  const std::vector<nlohmann::json> starts = metrics(folder.path() + "/runs/tiny-001", "started");
  ASSERT_EQ(starts.size(), 1U);
  EXPECT_EQ(starts[0]["step"], 0);
  EXPECT_EQ(starts[0]["started"]["ranks"], 1);
  EXPECT_EQ(starts[0]["started"]["mesh"], "data 1 x context 1");
  EXPECT_EQ(starts[0]["started"]["resumed"], false);
  EXPECT_FALSE(starts[0]["started"].contains("peak_flops"));
  int64_t planned = 0;
  for (const auto& [part, bytes] : starts[0]["memory_plan"].items())
    planned += part == "total" ? 0 : bytes.get<int64_t>();
  EXPECT_EQ(planned, starts[0]["memory_plan"]["total"]);

  // Another process of the run says everything again, because it counts anew. Two ranks wait for each other.
  config.run.steps = 9;
  EXPECT_EQ(train(config, 2, folder.path() + "/runs/tiny-001").code, 0);
  const std::vector<nlohmann::json> more = metrics(folder.path() + "/runs/tiny-001");
  ASSERT_EQ(more.size(), 9U);
  EXPECT_TRUE(more[6].contains("caches") && more[6].contains("plans_made") && more[6].contains("targets_share"));
  EXPECT_TRUE(more[7].contains("exposed_ring_seconds"));
  EXPECT_EQ(more[7]["ranks"]["tokens"]["most"], 128);
  EXPECT_EQ(more[7]["rank_compute_seconds"].size(), 2U);
  EXPECT_EQ(metrics(folder.path() + "/runs/tiny-001", "started").back()["step"], 6);
}

TEST(Trainer, ResumedRunEqualsUninterruptedRun) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.validation.every = 2;
  for (const int ranks : {1, 2}) {
    config.model.dtype = ranks == 1 ? "fp64" : "fp32";
    config.run.name = "straight" + std::to_string(ranks);
    const std::string straight = folder.path() + "/runs/" + config.run.name + "-001";
    EXPECT_EQ(train(config, ranks).code, 0);
    // The stop callback is called once per step and once per validation batch, of which there are two after every
    // second step: calls 1 2 (steps), 3 4 (batches), 5 6 (steps), ...
    for (const int stop_at : {3, 5}) {
      config.run.name = "stopped" + std::to_string(ranks) + std::to_string(stop_at);
      const std::string stopped = folder.path() + "/runs/" + config.run.name + "-001";
      const Result first = train(config, ranks, std::nullopt, stop_at);
      EXPECT_EQ(first.code, 143);
      EXPECT_NE(first.out.find("--resume " + stopped), std::string::npos) << first.out;
      const size_t done = losses(stopped).size();
      EXPECT_LT(done, 6U);
      EXPECT_GT(done, 0U);
      const Result second = train(config, ranks, stopped);
      EXPECT_EQ(second.code, 0) << second.out;
      EXPECT_EQ(losses(stopped), losses(straight));
      EXPECT_EQ(checkpoint_tensors(stopped, 6), checkpoint_tensors(straight, 6));
    }
  }
}

TEST(Trainer, ResumesAtAnotherNumberOfRanks) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.model.dtype = "fp64";
  train(config, 1);
  const std::string straight = folder.path() + "/runs/tiny-001";
  EXPECT_EQ(train(config, 2, std::nullopt, 3).code, 143);
  EXPECT_EQ(train(config, 4, "").code, 0) << "the newest run of this name";
  expect_equal_losses(losses(folder.path() + "/runs/tiny-002"), losses(straight), "resumed at 4 ranks");
}

// fp64 has every number of fp32, so a run that goes on in fp64, and then in fp32 again, has lost nothing. The two ranks
// in between read and write parts of tensors.
TEST(Trainer, ResumesInAnotherDtype) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  still(config.optimizer);
  config.run.steps = 1;
  EXPECT_EQ(train(config, 1).code, 0);
  const std::string run = folder.path() + "/runs/tiny-001";
  for (const auto& [dtype, ranks] : {std::pair<std::string, int>{"fp64", 2}, {"fp32", 1}}) {
    ++config.run.steps;
    config.model.dtype = dtype;
    const std::string out = train(config, ranks, run).out;
    EXPECT_NE(out.find("changed: model.dtype = \"" + dtype + "\""), std::string::npos) << out;
  }
  const std::string step = run + "/checkpoints/step-0000000";
  const SafetensorsFile part(step + "2/model-00000-of-00002.safetensors");
  for (const TensorInfo& tensor : part.tensors()) EXPECT_EQ(tensor.dtype, at::kDouble) << tensor.name;
  const SafetensorsFile before(step + "1/model.safetensors"), after(step + "3/model.safetensors");
  for (const TensorInfo& tensor : before.tensors()) {
    EXPECT_TRUE(after.load(tensor.name).equal(before.load(tensor.name))) << tensor.name;
  }
}

TEST(Trainer, SkipsADamagedCheckpoint) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.checkpoint.every = 2;
  train(config, 1);
  const std::string run = folder.path() + "/runs/tiny-001";
  const std::string straight = checkpoint_bytes(run, 6, "model.safetensors");
  const std::string file = run + "/checkpoints/step-00000006/model.safetensors";
  fs::resize_file(file, fs::file_size(file) - 1);
  const Result r = train(config, 2, run);
  EXPECT_EQ(r.code, 0);
  EXPECT_NE(r.out.find("step-00000006"), std::string::npos) << r.out;
  EXPECT_NE(r.out.find("resumed after step 4"), std::string::npos) << r.out;
  EXPECT_EQ(losses(run).size(), 6U);
}

TEST(Trainer, RefusesWhatCannotBeResumed) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  const auto refused = [&](const std::string& resume, ErrorKind kind, const std::string& word) {
    expect_error(kind, {word}, [&] { train(config, 2, resume); });
  };
  refused(folder.path() + "/runs/tiny-001", ErrorKind::kInput, "tiny-001");
  train(config, 2);
  const std::string run = folder.path() + "/runs/tiny-001";
  refused(run, ErrorKind::kUsage, "run.steps");
  config.run.steps = 8;
  // Some of these changes keep all shapes, so that the weights could be loaded, but change what the model computes.
  const std::string written = file_text(run + "/config.toml");
  const Config trained = config;
  const auto refused_key = [&](auto& member, auto value, const std::string& word) {
    member = value;
    refused(run, ErrorKind::kUsage, word);
    config = trained;
    EXPECT_EQ(file_text(run + "/config.toml"), written) << word;
  };
  refused_key(config.model.heads, 2, "model.heads = 4, now it is 2");
  refused_key(config.model.ffn, 96, "model.ffn = 64, now it is 96");
  refused_key(config.model.rope_theta, 5000.0, "model.rope_theta = 10000.0, now it is 5000.0");
  refused_key(config.model.tie_embeddings, true, "model.tie_embeddings = false, now it is true");
  refused_key(config.model.norm_eps, 1e-6, "model.norm_eps");
  fs::remove_all(run + "/checkpoints");
  refused(run, ErrorKind::kInput, "no usable checkpoint");
}

// Checkpoints of versions that drew rows at random record nothing about the data.
TEST(Trainer, ResumesOldRunsThatDrewRowsAtRandom) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  EXPECT_EQ(train(config, 1).code, 0);
  const std::string run = config.run.folder + "/tiny-001";
  CheckpointStore store(run, 3);
  std::vector<std::string> skipped;
  const std::shared_ptr<Communicator> self = make_self_communicator();
  std::optional<TrainingState> state = store.open_newest_valid(*self, &skipped);
  ASSERT_TRUE(state);
  std::vector<NamedTensor> tensors;
  for (const char* file : {"/model.safetensors", "/optimizer.safetensors"}) {
    const SafetensorsFile saved(state->folder + file);
    for (const TensorInfo& t : saved.tensors()) tensors.push_back({t.name, saved.load(t.name)});
  }
  for (const char* key : {"data", "tokens", "token"}) EXPECT_EQ(state->extra.erase(key), 1U);
  state->extra["text"] = "of an earlier version";
  store.save(*self, *state, whole_slices(tensors));
  config.run.steps = 9;
  const Result r = train(config, 2, run);
  EXPECT_EQ(r.code, 0);
  EXPECT_NE(r.out.find("this run drew its rows at random"), std::string::npos) << r.out;
  EXPECT_EQ(metrics(run).back()["tokens"], 9 * 256);
  EXPECT_EQ(metrics(run).back()["sources"]["train"]["rows"], 3 * 4) << "only the steps since the resume are counted";
  config.run.steps = 10;
  EXPECT_EQ(train(config, 1, run).out.find("at random"), std::string::npos) << "the note appears once";
}

// A job with two packed token sources of unequal weight sees the same rows on any number of ranks, also across stops.
TEST(Trainer, ResumesWithOtherRankCountsOnTheSameRows) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.model.dtype = "fp64";
  config.run.steps = 12;
  const auto shard = [&](const std::string& name, uint16_t first) {
    std::vector<uint16_t> tokens;
    uint32_t state = first;
    for (int i = 0; i < 4000; ++i) {
      state = state * 1664525 + 1013904223;
      tokens.push_back(static_cast<uint16_t>((state >> 24) < 8 ? 0 : first + (state >> 27)));
    }
    const std::string path = folder.path() + "/" + name + ".bin";
    std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(tokens.data()), 8000);
    return SourceConfig{.name = name, .files = {path}, .format = "nanogpt", .end = 0, .weight = first == 1 ? 3.0 : 1.0};
  };
  config.data.train = std::vector<SourceConfig>{shard("a", 1), shard("b", 100)};
  config.data.packing = "best-fit";
  config.data.documents = true;
  config.data.accumulate = 2;
  config.data.batch = 2;
  config.data.context.stages = {{.step = 0, .context = 48}, {.step = 7, .context = 96}};
  config.validation.every = 6;
  const Result whole = train(config, 1);
  EXPECT_EQ(whole.code, 0);
  EXPECT_EQ(whole.out.find("sample:"), std::string::npos) << "nothing says what the ids mean\n" << whole.out;
  const std::string straight = config.run.folder + "/tiny-001";
  const Result stopped = train(config, 4, std::nullopt, 4);
  EXPECT_NE(stopped.code, 0);
  EXPECT_NE(stopped.out.find("\nstopped after step 4 of 12; checkpoint written ("), std::string::npos) << stopped.out;
  const std::string run = config.run.folder + "/tiny-002";
  EXPECT_NE(train(config, 3, run, 8).code, 0);  // stops in step 8: a validation calls the stop callback four times
  EXPECT_EQ(train(config, 2, run).code, 0);
  const std::vector<double> one = losses(straight), other = losses(run);
  ASSERT_EQ(one.size(), 12U);
  expect_equal_losses(other, one, "4, 3 and 2 ranks");
  const nlohmann::json end = metrics(straight).back(), resumed = metrics(run).back();
  EXPECT_EQ(end["sources"], resumed["sources"]);
  EXPECT_EQ(end["tokens"], resumed["tokens"]);
  EXPECT_EQ(end["sources"]["a"]["rows"], 36);
  EXPECT_EQ(end["sources"]["b"]["rows"], 12);
  int64_t validations = 0;
  for (const nlohmann::json& line : metrics(run)) {
    if (!line.contains("validation_loss")) continue;
    ++validations;
    EXPECT_TRUE(line["validation_sources"]["a"]["loss"].is_number());
    EXPECT_TRUE(line["validation_sources"]["b"]["loss"].is_number());
    EXPECT_FALSE(line.contains("validation_bits_per_byte")) << "the tokens are not bytes";
  }
  EXPECT_EQ(validations, 2);
}

// Until a resumed run saves its own checkpoint, config.toml stays the configuration that the existing checkpoints have.
TEST(Trainer, ResumedConfigurationIsWrittenWithTheFirstCheckpoint) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  EXPECT_EQ(train(config, 1).code, 0);
  const std::string run = folder.path() + "/runs/tiny-001", written = file_text(run + "/config.toml");
  config.run.steps = 8;
  std::ostringstream out;
  run_ranks(1, [&](Communicator& world) {
    TrainOptions options;
    options.resume = run;
    options.out = &out;
    options.stop = []() -> bool { throw Error(ErrorKind::kComm, "test", "a rank is gone"); };
    EXPECT_THROW(run_training(config, world, options), Error);
  });
  EXPECT_NE(out.str().find("resumed after step 6"), std::string::npos) << out.str();
  EXPECT_EQ(file_text(run + "/config.toml"), written);
  EXPECT_EQ(train(config, 1, run).code, 0);
  EXPECT_EQ(load_config(run + "/config.toml"), config);
}

TEST(Trainer, ResumeReportsChangedKeys) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  EXPECT_EQ(train(config, 1).code, 0);
  const std::string run = folder.path() + "/runs/tiny-001";
  config.run.steps = 12;
  config.model.pattern = parse_pattern("{ kind = 'window', left = 31, right = 0 }", "test");
  const std::string out = train(config, 1, run).out;
  // With 2 steps of warm-up the rate has decayed to a tenth of 1e-2 after 6 of 6 steps; of 12 steps, only 4 of the 10
  // steps of decay are done.
  for (const char* word : {"changed: run.steps = 12 (it was 6)", "changed: model.pattern = ", "a query sees other keys",
                           "the learning rate goes from 0.001 to 0.0069: it decays until run.steps, which was 6\n"}) {
    EXPECT_NE(out.find(word), std::string::npos) << word << " is not in\n" << out;
  }
  const std::string again = train(config, 1, std::nullopt, 3).out, onward = train(config, 1, "").out;
  EXPECT_NE(onward.find("resumed after step"), std::string::npos) << again << onward;
  EXPECT_EQ(onward.find("learning rate goes"), std::string::npos) << onward;
}

// After the first update at such a rate the losses are not finite, so that all further updates are left out.
TEST(Trainer, RunFailsIfItsUpdatesAreLeftOut) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.optimizer.lr = 1e30;
  config.checkpoint.every = 2;
  std::ostringstream out;
  run_ranks(2, [&](Communicator& world) {
    TrainOptions options;
    options.out = &out;
    expect_error(ErrorKind::kUsage, {"in a row, the last at step 6;"}, [&] { run_training(config, world, options); });
  });
  EXPECT_NE(out.str().find("this update is left out"), std::string::npos) << out.str();
  EXPECT_EQ(out.str().find("done:"), std::string::npos) << out.str();
  EXPECT_FALSE(fs::exists(folder.path() + "/runs/tiny-001/checkpoints")) << "such weights are not saved";
}

TEST(Trainer, RefusedRunCreatesNoFolder) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.data.train = {folder.path() + "/missing.txt"};
  EXPECT_THROW(train(config, 2), Error);
  config = tiny_config(folder);
  config.data.batch = 3;
  config.mesh.data = 2;
  EXPECT_THROW(train(config, 2), Error);
  config = tiny_config(folder);
  config.attention.kernel = "cudnn";  // on a CPU
  EXPECT_THROW(train(config, 2), Error);
  EXPECT_FALSE(fs::exists(folder.path() + "/runs"));
}

// The plan is printed first, then the run is refused before it allocates anything.
TEST(Trainer, RefusesRunsThatDoNotFitIntoMemory) {
  const TestFolder folder;
  const auto refused = [&](const Config& config, int64_t available, int ranks_here) {
    std::ostringstream out;
    std::string said;
    run_ranks(2, [&](Communicator& world) {
      TrainOptions options;
      options.out = &out;
      options.ranks_here = ranks_here;
      // One host has less than the other.
      options.available = [&] { return AvailableMemory{world.rank() == 1 ? available : int64_t{1} << 40, "a test"}; };
      const std::string error = error_text(ErrorKind::kResource, [&] { run_training(config, world, options); });
      if (world.rank() == 1) said = error;
    });
    EXPECT_FALSE(fs::exists(config.run.folder));
    return out.str() + said;
  };
  const auto expect_in = [](const std::string& text, const std::vector<std::string>& words) {
    for (const std::string& word : words) EXPECT_NE(text.find(word), std::string::npos) << word << " not in\n" << text;
  };
  Config config = tiny_config(folder);
  expect_in(refused(config, 1'500'000, 2),
            {"memory: ", " MB planned for each rank: weights", "[memory] the run needs ",
             " for the 2 ranks of this host", "and 1.5 MB are free (a test): ", "ANNULUS_MEMORY_CHECK=0"});
  config.data.batch = 1 << 24;
  expect_in(refused(config, 1'000'000'000, 2),
            {"at least 137.4 GB a rank", "1.0 GB are free",
             "no optimizer.shard, model.recompute, offload or shorter data.context makes it fit: with "
             "optimizer.shard = 3, model.recompute = true, memory.offload and optimizer.offload even rows of 4 tokens "
             "need "});
  config = tiny_config(folder);
  config.model.layers = 100000;
  config.model.dim = 1 << 24;
  config.model.ffn = 1 << 24;
  const std::string absurd = refused(config, 1'000'000'000, 1);
  expect_in(absurd, {"T parameters", "at least ", " EB a rank", "optimizer.offload it needs at least "});
  ::setenv("ANNULUS_MEMORY_CHECK", "0", 1);
  expect_in(refused(config, 1'000'000'000, 1), {"EB a rank, more than any machine has"});
  ::unsetenv("ANNULUS_MEMORY_CHECK");
}

TEST(Trainer, MismatchedConfigurationsNameTheKey) {
  const TestFolder folder;
  const Config config = tiny_config(folder);
  run_ranks(2, [&](Communicator& world) {
    Config mine = config;
    if (world.rank() == 1) mine.optimizer.lr *= 2;
    std::ostringstream out;
    TrainOptions options;
    options.out = &out;
    expect_error(ErrorKind::kMismatch, {"optimizer.lr"}, [&] { run_training(mine, world, options); });
  });
  EXPECT_FALSE(fs::exists(config.run.folder));
}

}  // namespace
}  // namespace annulus::trainer_test
