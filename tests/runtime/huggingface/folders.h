// Writes folders in Hugging Face's layout with weights that differ between elements and tensors. Used by the tests of
// runtime/huggingface/ and of training that imports a model.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "runtime/model/model_shape.h"
#include "runtime/run/tensor_slice.h"
#include "runtime/tensor_files/named_tensor.h"
#include "runtime/tensor_files/safetensors.h"

namespace annulus {

inline ModelShape small_shape() {
  return {.layers = 2, .dim = 16, .heads = 4, .kv_heads = 2, .ffn = 24, .vocab = 40, .head_size = 4};
}

// The config.json of a Llama of this shape.
inline nlohmann::ordered_json llama_config(const ModelShape& s) {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"model_type", "llama"},
          {"hidden_size", s.dim},
          {"num_hidden_layers", s.layers},
          {"num_attention_heads", s.heads},
          {"num_key_value_heads", s.kv_heads},
          {"head_dim", s.head_dim()},
          {"intermediate_size", s.ffn},
          {"vocab_size", s.vocab},
          {"max_position_embeddings", 256},
          {"rms_norm_eps", s.norm_eps},
          {"rope_theta", s.rope_theta},
          {"tie_word_embeddings", s.tie_embeddings},
          {"torch_dtype", "float32"}};
}

using Tensors = std::map<std::string, at::Tensor>;

inline Tensors weights_of(const ModelShape& shape, at::ScalarType dtype = at::kFloat) {
  Tensors tensors;
  double begin = 1;
  for (const DescribedUnit& group : described_units(shape)) {
    for (const ParameterShape& p : group.parameters) {
      tensors[p.name] = at::arange(p.count(), at::kDouble).add(begin++).mul(1e-3).sin().to(dtype).view(p.shape);
    }
  }
  return tensors;
}

inline std::string fresh_folder(const std::string& name) {
  const std::string path = ::testing::TempDir() + "/" + name;
  std::filesystem::remove_all(path);
  std::filesystem::create_directories(path);
  return path;
}

inline void write_text(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

inline void write_file(const std::string& path, const Tensors& tensors) {
  std::vector<NamedTensor> list;
  for (const auto& [name, tensor] : tensors) list.push_back({name, tensor});
  write_safetensors(path, list, {{"format", "pt"}});
}

inline std::string shard_name(int shard, int shards) {
  char name[64];
  std::snprintf(name, sizeof name, "model-%05d-of-%05d.safetensors", shard + 1, shards);
  return name;
}

// Writes the tensors to one file, or deals them in turn to `shards` files and writes an index, which is returned.
inline nlohmann::json write_weights(const std::string& folder, const Tensors& tensors, int shards = 1) {
  if (shards == 1) {
    write_file(folder + "/model.safetensors", tensors);
    return {};
  }
  std::vector<Tensors> files(static_cast<size_t>(shards));
  nlohmann::json map;
  size_t total = 0, i = 0;
  for (const auto& [name, tensor] : tensors) {
    const size_t shard = i++ % static_cast<size_t>(shards);
    files[shard][name] = tensor;
    map[name] = shard_name(static_cast<int>(shard), shards);
    total += tensor.nbytes();
  }
  for (int s = 0; s < shards; ++s) {
    write_file(folder + "/" + shard_name(s, shards), files[static_cast<size_t>(s)]);
  }
  nlohmann::json index = {{"metadata", {{"total_size", total}}}, {"weight_map", map}};
  write_text(folder + "/model.safetensors.index.json", index.dump());
  return index;
}

// Uninitialized slices into which all tensors of a shape can be read.
inline std::vector<TensorSlice> empty_slices(const ModelShape& shape, at::ScalarType dtype = at::kFloat) {
  std::vector<TensorSlice> slices;
  for (const DescribedUnit& group : described_units(shape)) {
    for (const ParameterShape& p : group.parameters) {
      slices.push_back({p.name, p.shape, 0, at::empty({p.count()}, at::TensorOptions().dtype(dtype))});
    }
  }
  return slices;
}

}  // namespace annulus
