// ModelShape: the description of a decoder from which its parameters, their names, its FLOPs, its memory plan and its
// forward follow. Llama, Mistral, Qwen 2.5 and Qwen 3 are values of it. Used by the model, configurations, the memory
// planner and the mapping from and to Hugging Face's config.json. Needs no LibTorch. Thread-safe: values and pure
// functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "attention/modules/rotary_spec.h"

namespace annulus {

struct ModelShape {
  int64_t layers = 0;
  int64_t dim = 0;  // width of the residual stream
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t ffn = 0;
  int64_t vocab = 0;
  int64_t head_size = 0;  // 0: dim / heads
  double rope_theta = 10000;
  RotaryScaling rope_scaling = {};
  bool rope_fp32 = false;  // RotarySpec::fp32
  bool tie_embeddings = false;
  double norm_eps = 1e-5;
  bool qkv_bias = false;  // of the projections to queries, keys and values
  bool out_bias = false;  // of attention's output projection
  bool mlp_bias = false;  // of the MLP's three projections
  bool qk_norm = false;   // RMSNorm of each query and key over the head dimension, before the rotation

  int64_t head_dim() const { return head_size > 0 || heads <= 0 ? head_size : dim / heads; }
  int64_t q_width() const { return heads * head_dim(); }      // of all queries of a token
  int64_t kv_width() const { return kv_heads * head_dim(); }  // of all its keys, or values
  RotarySpec rotary() const { return {head_dim(), rope_theta, rope_scaling, rope_fp32}; }

  friend bool operator==(const ModelShape&, const ModelShape&) = default;
};

// Raises Error(kPlan) if sizes are not positive, if heads is not a multiple of kv_heads, if dim is not a multiple of
// heads and head_size is 0, or if the head dimension is odd.
void validate(const ModelShape& shape);

// A parameter: a matrix [out, in] or a vector, by its name in Hugging Face's layout.
struct ParameterShape {
  std::string name;
  std::vector<int64_t> shape;
  // Its initial value: normally distributed with standard deviation `std`, or `value` everywhere if std is 0.
  double std = 0;
  double value = 0;

  int64_t count() const;
};

// Parameters that are used together: the embedding, each layer (the last one with the final norm), and the output if it
// has a matrix of its own. In each unit, all matrices come before the first vector. The projections to queries, keys
// and values follow one another, as do those to gate and up, and their biases.
struct DescribedUnit {
  std::string name;  // "the embedding", "layer 3", "the output"
  std::vector<ParameterShape> parameters;
};
std::vector<DescribedUnit> described_units(const ModelShape& shape);

// Elements of all parameters. `parameter_estimate` also holds for counts of more than 63 bits.
int64_t parameter_count(const ModelShape& shape);
double parameter_estimate(const ModelShape& shape);

// The FLOPs of one token, forward and backward, with a multiply-add counted as two: 6 for each weight that is
// multiplied, and 12 * head_dim for each (query, key) pair of attention. `pairs`: pairs per token over all layers and
// query heads, so 4 * 8 * 1,024 for 4 causal layers of 8 heads over 2,047 positions.
double flops_per_token(const ModelShape& shape, double pairs);

}  // namespace annulus
