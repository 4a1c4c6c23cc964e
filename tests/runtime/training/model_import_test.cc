// Tests of a run whose weights come from a Hugging Face folder: at any world size and sharding level it starts with
// the same bits, copies the folder's files and resumes without the folder; a folder that does not match the
// configuration or the data is refused before training.
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "common/checksum.h"
#include "common/error.h"
#include "runtime/huggingface/model_config.h"
#include "runtime/run/checkpoint.h"
#include "tests/runtime/huggingface/folders.h"
#include "tests/runtime/training/tiny_run.h"
#include "tests/runtime/training/trainer_runs.h"

namespace annulus::model_import_test {
namespace {

ModelShape shape() {
  return {.layers = 2, .dim = 32, .heads = 4, .kv_heads = 2, .ffn = 64, .vocab = 256, .head_size = 16};
}

// A complete folder; a tokenizer is added on request.
std::string model_folder(const TestFolder& folder, bool tokenizer = false) {
  const std::string path = folder.path() + "/model";
  std::filesystem::create_directories(path);
  write_text(path + "/config.json", llama_config(shape()).dump());
  write_text(path + "/generation_config.json", "{\"temperature\": 0.6}");
  if (tokenizer) {
    write_text(path + "/tokenizer.json", R"({"model": {"type": "BPE", "vocab": {"a": 0, "b": 255}, "merges": []}})");
  }
  write_weights(path, weights_of(shape(), at::kBFloat16), 2);
  return path;
}

Config config_of(const TestFolder& folder, const std::string& from) {
  Config c = tiny_config(folder);
  static_cast<ModelSection&>(c.model) = read_model_config(from);
  c.model.from = from;
  return c;
}

Tensors checkpoint_weights(const std::string& run, int64_t step) {
  CheckpointStore store(run, 1);
  const TrainingState state = store.open(step);
  const std::vector<TensorSlice> slices = empty_slices(shape());
  store.read(state, slices);
  Tensors tensors;
  for (const TensorSlice& slice : slices) tensors[slice.name] = slice.values;
  return tensors;
}

TEST(ModelImport, StartsWithTheFoldersBitsAtEveryWorldSizeAndLevel) {
  for (const int ranks : {1, 2, 4}) {
    for (const int64_t shard : {0, 3}) {
      const TestFolder folder;
      Config config = config_of(folder, model_folder(folder));
      config.run.steps = 1;
      still(config.optimizer);
      config.optimizer.shard = shard;
      const Result result = train(config, ranks);
      const std::string run = config.run.folder + "/tiny-001";
      EXPECT_NE(result.out.find("weights BF16 of " + config.model.from), std::string::npos) << result.out;
      const Tensors expected = weights_of(shape(), at::kBFloat16);
      for (const auto& [name, values] : checkpoint_weights(run, 1)) {
        EXPECT_TRUE(at::equal(values, expected.at(name).to(at::kFloat).view({-1}))) << name << " on " << ranks;
      }
      const std::string kept = run + "/huggingface";
      for (const char* name : {"config.json", "generation_config.json"}) {
        EXPECT_EQ(file_text(kept + "/" + name), file_text(config.model.from + "/" + name));
      }
    }
  }
}

TEST(ModelImport, WeightsAreReadIntoATier) {
  const TestFolder folder;
  Config config = config_of(folder, model_folder(folder));
  config.run.steps = 1;
  still(config.optimizer);
  config.model.dtype = "bf16";
  config.optimizer.shard = 3;
  config.optimizer.offload = "file";
  const Result result = train(config, 2);
  EXPECT_EQ(result.code, 0) << result.out;
  const Tensors expected = weights_of(shape(), at::kBFloat16);
  for (const auto& [name, values] : checkpoint_weights(config.run.folder + "/tiny-001", 1)) {
    EXPECT_TRUE(at::equal(values, expected.at(name).to(at::kFloat).view({-1}))) << name;
  }
}

TEST(ModelImport, ResumeDoesNotNeedTheFolder) {
  const TestFolder folder;
  const Config config = config_of(folder, model_folder(folder));
  EXPECT_EQ(train(config, 2).code, 0);
  EXPECT_NE(train(config, 2, std::nullopt, /*stop_at=*/3).code, 0);
  std::filesystem::remove_all(config.model.from);
  const std::string stopped = config.run.folder + "/tiny-002";
  const Result resumed = train(config, 2, stopped);
  EXPECT_EQ(resumed.code, 0) << resumed.out;
  const std::string file = "model-00000-of-00002.safetensors";
  EXPECT_EQ(checkpoint_bytes(stopped, 6, file), checkpoint_bytes(config.run.folder + "/tiny-001", 6, file));
}

std::string refusal(const Config& config) {
  try {
    train(config, 2);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput) << error.what();
    EXPECT_FALSE(std::filesystem::exists(config.run.folder + "/tiny-001")) << "no run folder is created";
    return std::string(error.message());
  }
  return "nothing";
}

TEST(ModelImport, RefusesFolderThatDoesNotMatch) {
  const TestFolder folder;
  const std::string from = model_folder(folder, /*tokenizer=*/true);
  Config config = config_of(folder, from);
  EXPECT_NE(refusal(config).find("data.train is text"), std::string::npos) << refusal(config);
  std::filesystem::remove(from + "/tokenizer.json");
  EXPECT_EQ(refusal(config), "nothing");
  std::filesystem::remove_all(config.run.folder);
  config.model.ffn = 72;
  EXPECT_NE(refusal(config).find("mlp"), std::string::npos) << refusal(config);
  std::filesystem::remove(from + "/" + shard_name(1, 2));
  EXPECT_NE(refusal(config).find("is missing"), std::string::npos);
}

}  // namespace
}  // namespace annulus::model_import_test
