// ModelShape: the hyperparameters of a decoder, which determine its parameters, their names, FLOPs, memory plan and
// forward. They cover Llama, Mistral, SmolLM3, Qwen 2.5, Qwen 3 and Gemma 3. Used by the model, configurations, the
// memory planner and the mapping from and to Hugging Face's config.json. Needs no LibTorch. Thread safe: values and
// pure functions.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "attention/modules/rotary_spec.h"
#include "runtime/model/activation.h"

namespace annulus {

// How one layer rotates queries and keys: as rope_theta and rope_scaling say, unless it has settings of its `own`.
struct LayerRotary {
  bool own = false;
  double theta = 0;  // 0: rope_theta
  RotaryScaling scaling = {};

  friend bool operator==(const LayerRotary&, const LayerRotary&) = default;
};

// The rotary settings of the layers, which repeat: layer i has entry i modulo their number. Without any, every layer
// has rope_theta and rope_scaling.
struct LayerRotaries {
  std::vector<LayerRotary> cycle;

  std::string text() const;  // as TOML: a list of tables

  friend bool operator==(const LayerRotaries&, const LayerRotaries&) = default;
};

// Whether layers have something: all or none, or a list that repeats: layer i has entry i modulo their number.
struct LayerSwitch {
  LayerSwitch(bool all = false) : cycle{all} {}                    // NOLINT(google-explicit-constructor)
  LayerSwitch(std::vector<bool> list) : cycle(std::move(list)) {}  // NOLINT(google-explicit-constructor)
  std::vector<bool> cycle;                                         // not empty

  bool of(int64_t layer) const { return cycle[static_cast<size_t>(layer) % cycle.size()]; }
  bool any() const { return std::find(cycle.begin(), cycle.end(), true) != cycle.end(); }
  std::string text() const;  // as TOML: true, false or a list of them

  friend bool operator==(const LayerSwitch&, const LayerSwitch&) = default;
};

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
  LayerRotaries rope_layers = {};
  bool tie_embeddings = false;
  double norm_eps = 1e-5;
  bool qkv_bias = false;                      // of the query, key and value projections
  bool out_bias = false;                      // of attention's output projection
  bool mlp_bias = false;                      // of the MLP's three projections
  bool qk_norm = false;                       // RMSNorm of each query and key over the head dimension, before RoPE
  Activation activation = Activation::kSilu;  // of the MLP's gate
  bool norm_zero_centered = false;            // norms multiply by 1 + weight, and weights begin as zeros
  bool post_norms = false;                    // RMSNorm also of what attention and the MLP add to the residual stream
  bool scale_embeddings = false;              // embeddings are multiplied by sqrt(dim), rounded to the compute dtype
  double query_pre_attn_scalar = 0;           // scores are q.k / sqrt(query_pre_attn_scalar); 0: head_dim
  double softcap = 0;                         // a soft cap of attention's scores (AttentionCall::softcap); 0: none
  LayerSwitch attention_sinks = false;        // a learned logit for each head of a layer in the softmaxes' denominators

  int64_t head_dim() const { return head_size > 0 || heads <= 0 ? head_size : dim / heads; }
  int64_t q_width() const { return heads * head_dim(); }             // of all queries of a token
  int64_t kv_width() const { return kv_heads * head_dim(); }         // of all keys, or all values, of a token
  double norm_offset() const { return norm_zero_centered ? 1 : 0; }  // added to the weights of norms
  double score_divisor() const {
    return query_pre_attn_scalar > 0 ? query_pre_attn_scalar : static_cast<double>(head_dim());
  }
  double attention_scale() const { return 1 / std::sqrt(score_divisor()); }  // the factor of q.k
  // The rotary embedding of rope_theta and rope_scaling, that of a layer, and all that layers have, each once.
  RotarySpec rotary() const { return {head_dim(), rope_theta, rope_scaling, rope_fp32}; }
  RotarySpec rotary(int64_t layer) const;
  struct Rotaries {
    std::vector<RotarySpec> distinct;
    std::vector<size_t> of_layer;  // an index into `distinct`

    std::string text() const;  // everything: models with equal texts rotate alike
  };
  Rotaries rotaries() const;

  friend bool operator==(const ModelShape&, const ModelShape&) = default;
};

// Raises Error(kPlan) if sizes are not positive, if heads is not a multiple of kv_heads, if dim is not a multiple of
// heads and head_size is 0, if the head dimension is odd, if the soft cap is not one, or if rope_layers or
// attention_sinks have more entries than there are layers.
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
// with their biases, norms and sinks. The second has attention's output projection and the MLP with its norm and the
// norms of what is added to the residual stream, and in the last layer the final norm. In each unit, all matrices
// precede the vectors. The query, key and value projections are adjacent, as are the gate and up projections, and their
// biases.
struct DescribedUnit {
  // "the embedding", "q, k and v of layer 3", "the output projection and MLP of layer 3", "the output"
  std::string name;
  std::vector<ParameterShape> parameters;
};
std::vector<DescribedUnit> described_units(const ModelShape& shape);

// The names of a layer's norms besides input_layernorm, which follow "model.layers.N.". With norms of what attention
// and the MLP add, post_attention_layernorm is the one of attention's output.
std::string mlp_norm_name(const ModelShape& shape);
inline constexpr const char* kAttentionPostNorm = "post_attention_layernorm.weight";
inline constexpr const char* kMlpPostNorm = "post_feedforward_layernorm.weight";

// Return the number of elements of all parameters. `parameter_estimate` does not overflow.
int64_t parameter_count(const ModelShape& shape);
double parameter_estimate(const ModelShape& shape);

// Returns the FLOPs per token, forward and backward, with a multiply-add counted as two: 6 for each weight of a matrix
// product, and 12 * head_dim for each (query, key) pair of attention. `pairs`: pairs per token over all layers and
// query heads, e.g. 4 * 8 * 1,024 for 4 causal layers of 8 heads over 2,047 positions.
double flops_per_token(const ModelShape& shape, double pairs);

}  // namespace annulus
