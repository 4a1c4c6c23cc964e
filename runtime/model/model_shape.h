// ModelShape: the hyperparameters of a decoder, which determine its parameters, their names, FLOPs, memory plan and
// forward. They cover Llama, Mistral, Qwen 2.5 and Qwen 3. Used by the model, configurations, the memory planner and
// the mapping from and to Hugging Face's config.json. Needs no LibTorch. Thread safe: values and pure functions.
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
  bool qkv_bias = false;         // of the query, key and value projections
  bool out_bias = false;         // of attention's output projection
  bool mlp_bias = false;         // of the MLP's three projections
  bool qk_norm = false;          // RMSNorm of each query and key over the head dimension, before RoPE
  double softcap = 0;            // a soft cap of attention's scores (AttentionCall::softcap); 0: none
  bool attention_sinks = false;  // a learned logit for each head of a layer in the softmaxes' denominators

  int64_t head_dim() const { return head_size > 0 || heads <= 0 ? head_size : dim / heads; }
  int64_t q_width() const { return heads * head_dim(); }      // of all queries of a token
  int64_t kv_width() const { return kv_heads * head_dim(); }  // of all keys, or all values, of a token
  RotarySpec rotary() const { return {head_dim(), rope_theta, rope_scaling, rope_fp32}; }

  friend bool operator==(const ModelShape&, const ModelShape&) = default;
};

// Raises Error(kPlan) if sizes are not positive, if heads is not a multiple of kv_heads, if dim is not a multiple of
// heads and head_size is 0, if the head dimension is odd, or if the soft cap is not one.
void validate(const ModelShape& shape);

// A parameter: a matrix [out, in] or a vector, with its name in Hugging Face's layout.
struct ParameterShape {
  std::string name;
  std::vector<int64_t> shape;
  // Initialization: normal with standard deviation `std`, or the constant `value` if std is 0.
  double std = 0;
  double value = 0;

  int64_t count() const;
};

// Parameters that are used together (runtime/model/weight_use.h): the embedding, two units for each layer, and the
// output unless it is tied. The first unit of a layer has the norm before attention and the projections of q, k and v,
// with their biases and norms, and the sinks. The second has attention's output projection and the MLP with its norm,
// and in the last layer the final norm. In each unit, all matrices precede the vectors. The query, key and value
// projections are adjacent, as are the gate and up projections, and their biases.
struct DescribedUnit {
  // "the embedding", "q, k and v of layer 3", "the output projection and MLP of layer 3", "the output"
  std::string name;
  std::vector<ParameterShape> parameters;
};
std::vector<DescribedUnit> described_units(const ModelShape& shape);

// Return the number of elements of all parameters. `parameter_estimate` does not overflow.
int64_t parameter_count(const ModelShape& shape);
double parameter_estimate(const ModelShape& shape);

// Returns the FLOPs per token, forward and backward, with a multiply-add counted as two: 6 for each weight of a matrix
// product, and 12 * head_dim for each (query, key) pair of attention. `pairs`: pairs per token over all layers and
// query heads, e.g. 4 * 8 * 1,024 for 4 causal layers of 8 heads over 2,047 positions.
double flops_per_token(const ModelShape& shape, double pairs);

}  // namespace annulus
