// Tests of runtime/huggingface/export.h: an imported model is exported with the same bits and keys from checkpoints of
// any world size and sharding level; a full disk leaves no partial folder; and an export does not change how the run
// continues.
#include "runtime/huggingface/export.h"

#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "common/error.h"
#include "runtime/huggingface/byte_tokenizer.h"
#include "runtime/huggingface/model_config.h"
#include "runtime/huggingface/weights.h"
#include "tests/common/expect_error.h"
#include "tests/common/faulty_files.h"
#include "tests/runtime/huggingface/folders.h"
#include "tests/runtime/training/tiny_run.h"
#include "tests/runtime/training/trainer_runs.h"

namespace annulus::export_test {
namespace {

using Json = nlohmann::json;

ModelShape shape() {
  return {.layers = 2, .dim = 32, .heads = 4, .kv_heads = 2, .ffn = 64, .vocab = 256, .head_size = 16};
}

std::string model_folder(const TestFolder& folder, at::ScalarType dtype) {
  const std::string path = folder.path() + "/model";
  std::filesystem::create_directories(path);
  nlohmann::ordered_json config = llama_config(shape());
  config["torch_dtype"] = dtype == at::kBFloat16 ? "bfloat16" : dtype == at::kDouble ? "float64" : "float32";
  config["id2label"] = {{"0", "x"}};
  write_text(path + "/config.json", config.dump());
  write_text(path + "/generation_config.json", "{\"temperature\": 0.6}");
  write_text(path + "/special_tokens_map.json", "{}");
  write_weights(path, weights_of(shape(), dtype));
  return path;
}

// Trains one step that changes no weight; returns the run's folder. `dtype` replaces the folder's.
std::string still_run(const TestFolder& folder, const std::string& from, int ranks, int64_t shard,
                      const std::string& dtype = "") {
  Config c = tiny_config(folder);
  c.model = read_model_config(from);
  c.model.from = from;
  if (!dtype.empty()) c.model.dtype = dtype;
  c.run.steps = 1;
  still(c.optimizer);
  c.optimizer.shard = shard;
  EXPECT_EQ(train(c, ranks).code, 0);
  return c.run.folder + "/tiny-001";
}

ExportedModel exported(const ExportOptions& options, FileSystem& files = FileSystem::real()) {
  return export_model(
      options, [](const std::string& reason) { ADD_FAILURE() << reason; }, files);
}

// The bytes of a folder's files, by name.
std::map<std::string, std::string> content(const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    files[entry.path().filename()] = file_text(entry.path());
  }
  return files;
}

TEST(Export, ImportAndExportRoundTripAtEveryWorldSizeAndLevel) {
  for (const auto& [dtype, word] : {std::pair{at::kBFloat16, "bf16"}, {at::kFloat, "fp32"}, {at::kDouble, "fp64"}}) {
    for (const auto& [ranks, shard] : {std::pair{1, 0}, {2, 3}, {4, 1}}) {
      const TestFolder folder;
      const std::string from = model_folder(folder, dtype), out = folder.path() + "/out";
      const std::string run = still_run(folder, from, ranks, shard, word);
      const ExportedModel made = exported({.run = run, .out = out});
      EXPECT_EQ(made.architecture, "LlamaForCausalLM");
      EXPECT_EQ(made.dtype, word);
      EXPECT_EQ(made.context, 256);
      EXPECT_EQ(made.notes, std::vector<std::string>());
      const std::vector<TensorSlice> slices = empty_slices(shape(), dtype);
      const ModelWeights weights(out, shape());
      EXPECT_EQ(weights.fingerprint(), ModelWeights(from, shape()).fingerprint());
      weights.read(slices);
      const Tensors expected = weights_of(shape(), dtype);
      for (const TensorSlice& slice : slices) {
        EXPECT_TRUE(at::equal(slice.values, expected.at(slice.name).view({-1}))) << slice.name;
      }
      EXPECT_EQ(Json::parse(file_text(out + "/config.json")), Json::parse(file_text(from + "/config.json")));
      for (const char* name : {"generation_config.json", "special_tokens_map.json"}) {
        EXPECT_EQ(file_text(out + "/" + name), file_text(from + "/" + name));
      }
      // The run continues like one without an export, and a run can start from the exported folder.
      still_run(folder, from, ranks, shard, word);
      const std::string other = folder.path() + "/runs/tiny-002";
      Config again = load_config(run + "/config.toml");
      again.run.steps = 3;
      EXPECT_EQ(train(again, ranks, run).code, 0);
      EXPECT_EQ(train(again, ranks, other).code, 0);
      const std::string last = "/checkpoints/step-00000003";
      std::map<std::string, std::string> trained = content(run + last), as_without = content(other + last);
      EXPECT_GE(trained.size(), 3U);
      EXPECT_TRUE(trained == as_without);
      EXPECT_EQ(exported({.run = run, .out = folder.path() + "/later"}).step, 3);
      std::filesystem::remove_all(from);
      std::filesystem::rename(out, from);
      EXPECT_EQ(train(load_config(run + "/config.toml"), ranks).code, 0);
    }
  }
}

TEST(Export, SplitsWeightsIntoFilesWithAnIndex) {
  const TestFolder folder;
  const std::string run = still_run(folder, model_folder(folder, at::kFloat), 2, 3), out = folder.path() + "/out";
  const ExportedModel made = exported({.run = run, .out = out, .dtype = "bf16", .shard_bytes = 20000});
  const Json index = Json::parse(file_text(out + "/model.safetensors.index.json"));
  EXPECT_EQ(index["metadata"]["total_size"], 2 * parameter_count(shape()));
  EXPECT_FALSE(std::filesystem::exists(out + "/model.safetensors"));
  EXPECT_EQ(made.files.size(), content(out).size());
  EXPECT_EQ(Json::parse(file_text(out + "/config.json"))["torch_dtype"], "bfloat16");
  const std::vector<TensorSlice> slices = empty_slices(shape(), at::kBFloat16);
  ModelWeights(out, shape()).read(slices);
  const Tensors expected = weights_of(shape());
  for (const TensorSlice& slice : slices) {
    EXPECT_TRUE(at::equal(slice.values, expected.at(slice.name).view({-1}).to(at::kBFloat16))) << slice.name;
  }
}

TEST(Export, FullDiskLeavesNoPartialFolder) {
  const TestFolder folder;
  const std::string run = still_run(folder, model_folder(folder, at::kFloat), 1, 0);
  const std::string parent = folder.path() + "/parent", out = parent + "/out";
  std::filesystem::create_directories(parent);
  int faults = 0;
  for (;; ++faults) {
    FaultyFiles files(FaultyFiles::Fault::kFull, faults);
    try {
      exported({.run = run, .out = out, .shard_bytes = 20000}, files);
      if (!files.failed()) break;
      FAIL() << "the failure of operation " << faults << " was not reported";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kResource) << error.what();
    }
    // If an operation fails after the folder has got its final name, the folder is complete.
    for (const auto& entry : std::filesystem::directory_iterator(parent)) {
      EXPECT_EQ(entry.path().filename(), "out");
      EXPECT_NO_THROW(ModelWeights(out, shape()));
      EXPECT_TRUE(std::filesystem::exists(out + "/config.json"));
      std::filesystem::remove_all(out);
    }
  }
  EXPECT_GT(faults, 30);
  expect_error(ErrorKind::kUsage, {out + " already exists"}, [&] { exported({.run = run, .out = out}); });
}

TEST(Export, ExportsAModelTrainedFromScratch) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.model.rope_scaling = {.kind = RotaryScaling::Kind::kYarn, .factor = 4, .original_context = 16};
  config.data.context.stages = {{.step = 0, .context = 32}, {.step = 3, .context = 128}};
  config.checkpoint.every = 2;
  config.checkpoint.keep = 9;
  EXPECT_EQ(train(config, 2).code, 0);
  const std::string run = config.run.folder + "/tiny-001";
  std::filesystem::create_directories(run + "/tokenizer");
  write_text(run + "/tokenizer/tokenizer.json", "{}");
  write_text(run + "/tokenizer/tokens.table", "table");

  const std::string early = folder.path() + "/early", late = folder.path() + "/late";
  EXPECT_EQ(exported({.run = run, .out = early, .step = 2}).context, 32) << "the context at step 2";
  const ExportedModel made = exported({.run = run, .out = late});
  EXPECT_EQ(made.step, 6);
  EXPECT_EQ(made.context, 128);
  ASSERT_EQ(made.notes.size(), 1U);
  EXPECT_NE(made.notes[0].find("fp64"), std::string::npos);
  const FolderConfig read = read_folder_config(late);
  EXPECT_EQ(read.family, "llama");
  EXPECT_EQ(read.model.rope_scaling, config.model.rope_scaling);
  EXPECT_EQ(file_text(late + "/tokenizer.json"), "{}");
  EXPECT_NE(file_text(late + "/tokenizer_config.json").find("PreTrainedTokenizerFast"), std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(late + "/tokens.table"));
  EXPECT_NO_THROW(ModelWeights(late, read.model));
}

TEST(Export, RefusesPatternsThatTheFamilyCannotExpress) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.model.pattern = parse_pattern("{ kind = \"dilated\", segment_lengths = [32], dilation_rates = [2] }", "test");
  config.run.steps = 1;
  EXPECT_EQ(train(config, 1).code, 0);
  const std::string run = config.run.folder + "/tiny-001", out = folder.path() + "/out";
  expect_error(ErrorKind::kUsage, {"--leave-pattern"}, [&] { exported({.run = run, .out = out}); });
  EXPECT_FALSE(std::filesystem::exists(out));
  const ExportedModel made = exported({.run = run, .out = out, .leave_pattern = true});
  EXPECT_NE(made.notes.back().find("dilated"), std::string::npos);
}

// The run's configuration may have changed since an older checkpoint, which records what its weights were trained with.
TEST(Export, OlderCheckpointKeepsItsOwnConfiguration) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.run.steps = 2;
  config.model.pattern = parse_pattern("{ kind = \"window\", left = -1, right = 0 }", "test");  // causal, so any family
  EXPECT_EQ(train(config, 1).code, 0);
  const std::string run = config.run.folder + "/tiny-001";
  config.run.steps = 4;
  config.model.pattern = parse_pattern("{ kind = \"window\", left = 15, right = 0 }", "test");
  EXPECT_EQ(train(config, 1, run).code, 0);
  exported({.run = run, .out = folder.path() + "/old", .step = 2});
  exported({.run = run, .out = folder.path() + "/new"});
  EXPECT_EQ(read_folder_config(folder.path() + "/old").family, "llama");
  EXPECT_EQ(read_folder_config(folder.path() + "/new").model.pattern, config.model.pattern);
}

TEST(Export, SkipsADamagedCheckpoint) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.checkpoint.every = 3;
  EXPECT_EQ(train(config, 1).code, 0);
  const std::string run = config.run.folder + "/tiny-001";
  {
    std::fstream file(run + "/checkpoints/step-00000006/model.safetensors", std::ios::in | std::ios::out);
    file.seekp(-1, std::ios::end);
    file.put('!');
  }
  std::vector<std::string> reasons;
  const std::string parent = folder.path() + "/parent";
  std::filesystem::create_directories(parent);
  const ExportedModel made =
      export_model({.run = run, .out = parent + "/out"}, [&](const std::string& reason) { reasons.push_back(reason); });
  EXPECT_EQ(made.step, 3);
  EXPECT_EQ(reasons.size(), 1U);
  EXPECT_EQ(content(parent + "/out").size(), 4U) << "config.json, weights and the two files of the tokenizer";
}

TEST(Export, RunOnBytesHasTheTokenizerOfBytes) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.run.steps = 1;
  config.model.vocab = 300;
  EXPECT_EQ(train(config, 1).code, 0);
  const std::string out = folder.path() + "/out", again = folder.path() + "/again";
  const ExportedModel made = exported({.run = config.run.folder + "/tiny-001", .out = out});
  const ByteTokenizer bytes = byte_tokenizer({}, 300);
  EXPECT_EQ(file_text(out + "/tokenizer.json"), bytes.tokenizer);
  EXPECT_EQ(file_text(out + "/tokenizer_config.json"), bytes.config);
  for (const char* name : {"/tokenizer.json", "/tokenizer_config.json"}) {
    EXPECT_EQ(std::count(made.files.begin(), made.files.end(), out + name), 1) << name;
  }
  // A run that begins from the folder takes text again, and keeps its tokenizer.
  EXPECT_EQ(content(folder.path() + "/out").size(), made.files.size());
  still_run(folder, out, 1, 0);
  EXPECT_EQ(exported({.run = config.run.folder + "/tiny-002", .out = again}).step, 1);
  EXPECT_EQ(file_text(again + "/tokenizer.json"), bytes.tokenizer);
  EXPECT_EQ(file_text(again + "/tokenizer_config.json"), bytes.config);
}

TEST(Export, RunOnIdsHasNoTokenizerUnlessItsShardsHaveOne) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.run.steps = 1;
  const std::string shard = folder.path() + "/shard.bin", out = folder.path() + "/out";
  std::string ids;  // of two bytes each
  for (const char c : file_text(folder.path() + "/text.txt")) ids += {c, '\0'};
  write_text(shard, ids);
  config.data.train = std::vector<SourceConfig>{{.files = {shard}, .format = "nanogpt"}};
  EXPECT_EQ(train(config, 1).code, 0);
  exported({.run = config.run.folder + "/tiny-001", .out = out});
  EXPECT_FALSE(std::filesystem::exists(out + "/tokenizer.json"));
  EXPECT_FALSE(std::filesystem::exists(out + "/tokenizer_config.json"));
}

TEST(Export, TokenizerOfBytesHasTheSpecialTokensOfTheImportedModel) {
  const TestFolder folder;
  const std::string from = folder.path() + "/model", out = folder.path() + "/out";
  std::filesystem::create_directories(from);
  ModelShape wide = shape();
  wide.vocab = 260;
  nlohmann::ordered_json config = llama_config(wide);
  config["bos_token_id"] = 256;
  config["eos_token_id"] = 2;
  write_text(from + "/config.json", config.dump());
  write_text(from + "/generation_config.json", "{\"eos_token_id\": [2, 259]}");
  write_weights(from, weights_of(wide));
  const std::string run = still_run(folder, from, 1, 0);
  exported({.run = run, .out = out});
  const ByteTokenizer bytes = byte_tokenizer({.begin = 256, .ends = {259}}, 260);
  EXPECT_EQ(file_text(out + "/tokenizer.json"), bytes.tokenizer);
  EXPECT_EQ(file_text(out + "/tokenizer_config.json"), bytes.config);
  // Ids that cannot be read are an error of that file, not of the checkpoint.
  write_text(run + "/huggingface/generation_config.json", "{\"eos_token_id\": \"end\"}");
  expect_error(ErrorKind::kInput, {"generation_config.json", "eos_token_id"},
               [&] { exported({.run = run, .out = folder.path() + "/other"}); });
}

TEST(Export, SaysThatTransformersTakesTheTokenizerOfQwen2ForAnother) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.run.steps = 1;
  config.model.qkv_bias = true;
  EXPECT_EQ(train(config, 1).code, 0);
  const ExportedModel made = exported({.run = config.run.folder + "/tiny-001", .out = folder.path() + "/out"});
  EXPECT_EQ(made.architecture, "Qwen2ForCausalLM");
  EXPECT_NE(made.notes.back().find("PreTrainedTokenizerFast.from_pretrained"), std::string::npos);
}

}  // namespace
}  // namespace annulus::export_test
