// Tests of runtime/huggingface/weights.h: weights are read whole or in slices, from one file or several, in every
// dtype; a tensor that does not match config.json or the index is refused by name before anything is read.
#include "runtime/huggingface/weights.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "common/error.h"
#include "tests/runtime/huggingface/folders.h"

namespace annulus::weights_test {
namespace {

const char* const kQ = "model.layers.0.self_attn.q_proj.weight";
const char* const kDown = "model.layers.1.mlp.down_proj.weight";

std::string refusal(const std::string& folder, const ModelShape& shape = small_shape()) {
  try {
    ModelWeights(folder, shape);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput) << error.what();
    return std::string(error.message());
  }
  return "nothing";
}

void expect_says(const std::string& said, std::initializer_list<std::string> words) {
  for (const std::string& word : words) EXPECT_NE(said.find(word), std::string::npos) << word << " in: " << said;
}

// The error for a folder with one file of these tensors, or "nothing".
std::string refusal_of(const Tensors& tensors, const ModelShape& shape = small_shape()) {
  const std::string folder = fresh_folder("refused");
  write_weights(folder, tensors);
  return refusal(folder, shape);
}

void expect_reads(const std::string& folder, const Tensors& tensors, const ModelShape& shape, at::ScalarType dtype) {
  const std::vector<TensorSlice> slices = empty_slices(shape, dtype);
  ModelWeights(folder, shape).read(slices);
  for (const TensorSlice& slice : slices) {
    EXPECT_TRUE(at::equal(slice.values, tensors.at(slice.name).view({-1}).to(dtype))) << slice.name;
  }
}

TEST(ModelWeights, ReadsOneFileAndSeveralInEveryDtype) {
  for (const at::ScalarType stored : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    const Tensors tensors = weights_of(small_shape(), stored);
    const std::string one = fresh_folder("one"), many = fresh_folder("many");
    write_weights(one, tensors);
    write_weights(many, tensors, 3);
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      expect_reads(one, tensors, small_shape(), dtype);
      expect_reads(many, tensors, small_shape(), dtype);
    }
    EXPECT_EQ(ModelWeights(one, small_shape()).fingerprint(), ModelWeights(many, small_shape()).fingerprint());
  }
}

TEST(ModelWeights, ReadsSlicesFromTheMiddleOfATensor) {
  const std::string folder = fresh_folder("slices");
  const Tensors tensors = weights_of(small_shape());
  write_weights(folder, tensors, 2);
  const ModelWeights weights(folder, small_shape());
  const TensorSlice slice{kDown, {16, 24}, 100, at::empty({57}, at::kFloat)};
  weights.read({slice});
  EXPECT_TRUE(at::equal(slice.values, tensors.at(kDown).view({-1}).narrow(0, 100, 57)));
  EXPECT_EQ(weights.bytes(), 4 * parameter_count(small_shape()));
  EXPECT_EQ(weights.dtypes(), std::vector<std::string>{"F32"});
}

TEST(ModelWeights, ReadsEveryTensorOfEveryFamily) {
  ModelShape shape = small_shape();
  shape.qkv_bias = shape.out_bias = shape.mlp_bias = shape.qk_norm = true;
  shape.head_size = 8;
  const std::string folder = fresh_folder("all");
  write_weights(folder, weights_of(shape));
  expect_reads(folder, weights_of(shape), shape, at::kFloat);
  expect_says(refusal(folder), {"model.safetensors", "bias", "has no tensor of this name"});
}

TEST(ModelWeights, IgnoresStoredRotaryFrequencies) {
  Tensors tensors = weights_of(small_shape());
  tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = at::full({2}, 1.0, at::kFloat);
  EXPECT_EQ(refusal_of(tensors), "nothing");
}

TEST(ModelWeights, ReadsAndChecksTiedMatrices) {
  ModelShape tied = small_shape();
  tied.tie_embeddings = true;
  Tensors tensors = weights_of(tied);
  EXPECT_EQ(refusal_of(tensors, tied), "nothing");
  expect_says(refusal_of(tensors), {"lm_head.weight", "in none of the 1 file"});
  const at::Tensor embedding = tensors["model.embed_tokens.weight"];
  tensors["lm_head.weight"] = embedding.clone();
  EXPECT_EQ(refusal_of(tensors, tied), "nothing") << "equal bits";
  tensors["lm_head.weight"][39][15] += 1;
  expect_says(refusal_of(tensors, tied),
              {"lm_head.weight", "model.embed_tokens.weight", "model.safetensors", "tie_word_embeddings"});
  tensors["lm_head.weight"] = embedding.to(at::kBFloat16);
  expect_says(refusal_of(tensors, tied), {"lm_head.weight"});
  // As in transformers, either of the two tensors suffices.
  tensors["lm_head.weight"] = embedding.clone();
  tensors.erase("model.embed_tokens.weight");
  const std::string folder = fresh_folder("tied");
  write_weights(folder, tensors);
  expect_reads(folder, weights_of(tied), tied, at::kFloat);
}

TEST(ModelWeights, ErrorsNameTensorsThatDoNotMatchTheConfiguration) {
  const Tensors good = weights_of(small_shape());
  const auto changed = [&](const std::string& name, const at::Tensor& tensor) {
    Tensors tensors = good;
    tensors[name] = tensor;
    return tensors;
  };
  Tensors tensors = good;
  tensors.erase(kDown);
  expect_says(refusal_of(tensors), {kDown, "in none"});
  expect_says(refusal_of(changed(kDown, good.at(kDown).t().contiguous())),
              {"model.safetensors", kDown, "transposed", "[24, 16]", "[16, 24]"});
  expect_says(refusal_of(changed(kDown, at::full({16, 23}, 1.0, at::kFloat))), {kDown, "[16, 23]", "[16, 24]"});
  expect_says(refusal_of(changed("model.layers.0.self_attn.qkv_proj.weight", good.at(kQ))),
              {"qkv_proj", "several projections"});
  expect_says(refusal_of(changed("model.layers.0.mlp.gate_up_proj.weight", good.at(kQ))),
              {"gate_up_proj", "several projections"});
  expect_says(refusal_of(changed("model.layers.0.self_attn.q_proj.qweight", good.at(kQ))), {"qweight", "quantised"});
  expect_says(refusal_of(changed(kQ, good.at(kQ).to(at::kInt))), {kQ, "I32", "quantised"});
  expect_says(refusal_of(changed("model.layers.2.self_attn.q_proj.weight", good.at(kQ))),
              {"model.layers.2.self_attn.q_proj.weight", "no tensor of this name", "did you mean"});
  expect_says(refusal_of(changed("norm.weight", good.at("model.norm.weight"))),
              {"\"norm.weight\"", "without its output"});
}

TEST(ModelWeights, RefusesAnInconsistentIndex) {
  const Tensors tensors = weights_of(small_shape());
  const std::string folder = fresh_folder("index"), path = folder + "/model.safetensors.index.json";
  const nlohmann::json index = write_weights(folder, tensors, 2);
  const std::string first = shard_name(0, 2), second = shard_name(1, 2);
  const auto says = [&](const nlohmann::json& lie) {
    write_text(path, lie.dump());
    return refusal(folder);
  };
  EXPECT_EQ(says(index), "nothing");
  nlohmann::json lie = index;
  const std::string at = lie["weight_map"][kDown], elsewhere = at == first ? second : first;
  lie["weight_map"][kDown] = elsewhere;
  expect_says(says(lie), {kDown, at, "is here, but according to", elsewhere});
  lie = index;
  lie["weight_map"].erase(kDown);
  expect_says(says(lie), {kDown, at, "is not in", "index.json"});
  lie = index;
  lie["weight_map"]["model.more"] = first;
  expect_says(says(lie), {"model.more", first, "is not in the file"});
  lie = index;
  lie["weight_map"][kDown] = "model-00003-of-00003.safetensors";
  expect_says(says(lie), {"model-00003-of-00003.safetensors: is missing", kDown});
  lie = index;
  lie["weight_map"][kDown] = "../elsewhere.safetensors";
  expect_says(says(lie), {kDown, "beside the index"});
  lie["weight_map"][kDown] = 7;
  expect_says(says(lie), {kDown, "beside the index"});
  lie = index;
  // Converted folders keep the total_size of the pickled files; transformers does not read it.
  lie["metadata"]["total_size"] = 5;
  EXPECT_EQ(says(lie), "nothing");
  lie = index;
  lie.erase("metadata");
  EXPECT_EQ(says(lie), "nothing") << "the size is optional";
  lie.erase("weight_map");
  expect_says(says(lie), {"weight_map"});
  write_text(path, "{");
  expect_says(refusal(folder), {"expected JSON"});
  write_text(path, index.dump());
  std::filesystem::remove(folder + "/" + second);
  expect_says(refusal(folder), {second + ": is missing"});
}

TEST(ModelWeights, RefusesPickledWeights) {
  const std::string folder = fresh_folder("pickled");
  expect_says(refusal(folder), {"neither model.safetensors nor"});
  write_text(folder + "/pytorch_model.bin", "pickle");
  expect_says(refusal(folder), {folder, "pickled", "save_pretrained"});
  write_text(folder + "/consolidated.safetensors", "");
  expect_says(refusal(folder), {"consolidated.safetensors"});
  expect_says(refusal(folder + "/nowhere"), {"nowhere"});
}

TEST(ModelWeights, FingerprintsDependOnTheWeights) {
  Tensors tensors = weights_of(small_shape());
  const std::string a = fresh_folder("a"), b = fresh_folder("b");
  write_weights(a, tensors);
  tensors["model.norm.weight"][3] += 1;
  write_weights(b, tensors);
  EXPECT_NE(ModelWeights(a, small_shape()).fingerprint(), ModelWeights(b, small_shape()).fingerprint());
}

}  // namespace
}  // namespace annulus::weights_test
