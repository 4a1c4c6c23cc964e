// See model.h.
#include "runtime/model.h"

#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <string>

#include "common/error.h"
#include "runtime/recompute.h"

namespace annulus {
namespace {

void require(bool ok, const std::string& message) {
  if (!ok) throw Error(ErrorKind::kPlan, "model", message);
}

std::string layer_name(int64_t layer, const char* rest) { return "model.layers." + std::to_string(layer) + "." + rest; }

}  // namespace

void validate(const ModelShape& s) {
  require(s.layers > 0 && s.dim > 0 && s.heads > 0 && s.kv_heads > 0 && s.ffn > 0 && s.vocab > 0,
          "layers, dim, heads, kv_heads, ffn and vocab must be positive, but are " + std::to_string(s.layers) + ", " +
              std::to_string(s.dim) + ", " + std::to_string(s.heads) + ", " + std::to_string(s.kv_heads) + ", " +
              std::to_string(s.ffn) + ", " + std::to_string(s.vocab));
  require(s.dim % (2 * s.heads) == 0, "dim " + std::to_string(s.dim) + " does not give " + std::to_string(s.heads) +
                                          " heads of an even dimension: make model.dim a multiple of " +
                                          std::to_string(2 * s.heads));
  require(s.heads % s.kv_heads == 0, std::to_string(s.heads) + " query heads cannot share " +
                                         std::to_string(s.kv_heads) +
                                         " kv heads evenly: model.heads must be a multiple of model.kv_heads");
}

int64_t parameter_count(const ModelShape& s) {
  const int64_t attention = s.dim * (2 * s.heads + 2 * s.kv_heads) * s.head_dim();
  return s.layers * (attention + 3 * s.dim * s.ffn + 2 * s.dim) + s.dim + (s.tie_embeddings ? 1 : 2) * s.vocab * s.dim;
}

double flops_per_token(const ModelShape& s, double pairs) {
  const double d = static_cast<double>(s.dim);
  const double qkvo = d * static_cast<double>(2 * s.heads + 2 * s.kv_heads) * static_cast<double>(s.head_dim());
  const double weights =
      static_cast<double>(s.layers) * (qkvo + 3 * d * static_cast<double>(s.ffn)) + d * static_cast<double>(s.vocab);
  return 6 * weights + 12 * static_cast<double>(s.head_dim()) * pairs;
}

Model::Model(const ModelShape& shape, uint64_t seed, at::ScalarType dtype, at::Device device) : shape_(shape) {
  validate(shape);
  const double std = 0.02;
  const double residual_std = std / std::sqrt(2.0 * static_cast<double>(shape.layers));
  const int64_t d = shape.dim;
  const int64_t kv = shape.kv_heads * shape.head_dim();
  Parameters& p = parameters_;
  p.add("model.embed_tokens.weight", {shape.vocab, d}, std);
  for (int64_t i = 0; i < shape.layers; ++i) {
    p.add(layer_name(i, "self_attn.q_proj.weight"), {d, d}, std);
    p.add(layer_name(i, "self_attn.k_proj.weight"), {kv, d}, std);
    p.add(layer_name(i, "self_attn.v_proj.weight"), {kv, d}, std);
    p.add(layer_name(i, "self_attn.o_proj.weight"), {d, d}, residual_std);
    p.add(layer_name(i, "mlp.gate_proj.weight"), {shape.ffn, d}, std);
    p.add(layer_name(i, "mlp.up_proj.weight"), {shape.ffn, d}, std);
    p.add(layer_name(i, "mlp.down_proj.weight"), {d, shape.ffn}, residual_std);
  }
  if (!shape.tie_embeddings) p.add("lm_head.weight", {shape.vocab, d}, std);
  for (int64_t i = 0; i < shape.layers; ++i) {
    p.add(layer_name(i, "input_layernorm.weight"), {d});
    p.add(layer_name(i, "post_attention_layernorm.weight"), {d});
  }
  p.add("model.norm.weight", {d});
  p.allocate(seed, dtype, device);

  embedding_ = p.leaf("model.embed_tokens.weight");
  for (int64_t i = 0; i < shape.layers; ++i) {
    layers_.push_back({.attention_norm = p.leaf(layer_name(i, "input_layernorm.weight")),
                       .qkv = p.leaf(layer_name(i, "self_attn.q_proj.weight"), 3),
                       .out = p.leaf(layer_name(i, "self_attn.o_proj.weight")),
                       .mlp_norm = p.leaf(layer_name(i, "post_attention_layernorm.weight")),
                       .gate_up = p.leaf(layer_name(i, "mlp.gate_proj.weight"), 2),
                       .down = p.leaf(layer_name(i, "mlp.down_proj.weight"))});
  }
  norm_ = p.leaf("model.norm.weight");
  head_ = shape.tie_embeddings ? embedding_ : p.leaf("lm_head.weight");
}

RotaryTable Model::rotary(const at::Tensor& positions) const {
  return make_rotary_table(positions, shape_.head_dim(), shape_.rope_theta, parameters_.values().scalar_type(),
                           embedding_.device());
}

at::Tensor Model::logits(const at::Tensor& tokens, const RotaryTable& table, const Attend& attend,
                         bool last_only) const {
  return at::linear(hidden(tokens, table, attend, last_only), head_);
}

at::Tensor Model::loss(const at::Tensor& tokens, const at::Tensor& targets, const RotaryTable& table,
                       const Attend& attend, double scale) const {
  return linear_cross_entropy_sum(hidden(tokens, table, attend, /*last_only=*/false), head_, targets, scale);
}

at::Tensor Model::hidden(const at::Tensor& tokens, const RotaryTable& table, const Attend& attend,
                         bool last_only) const {
  const int64_t batch = tokens.size(0);
  const int64_t n = tokens.size(1);
  const auto run = [&](const TensorFunction& f, const std::vector<at::Tensor>& inputs) {
    return recompute_ && at::GradMode::is_enabled() ? recomputed(f, inputs) : f(inputs);
  };
  // By value, what they use: they may run again in the backward. The residual stream x is [batch * n, dim]; `delta` is
  // what the next norm adds to it first.
  const TensorFunction before_attention = [shape = shape_, table](const std::vector<at::Tensor>& in) {
    const at::Tensor delta = in.size() > 3 ? in[3] : at::Tensor();
    const Normed a = add_rms_norm(in[0], delta, in[1], shape.norm_eps);
    const Heads heads = rotary_split(at::linear(a.y, in[2]), table, shape.heads, shape.kv_heads);
    return std::vector<at::Tensor>{a.sum, heads.q, heads.k, heads.v};
  };
  const TensorFunction after_attention = [shape = shape_](const std::vector<at::Tensor>& in) {
    const at::Tensor attended = at::linear(in[1].reshape({in[0].size(0), shape.dim}), in[2]);
    const Normed m = add_rms_norm(in[0], attended, in[3], shape.norm_eps);
    return std::vector<at::Tensor>{m.sum, at::linear(swiglu(at::linear(m.y, in[4])), in[5])};
  };
  at::Tensor x = at::embedding(embedding_, tokens.reshape({batch * n}));
  at::Tensor delta;
  for (int64_t i = 0; i < shape_.layers; ++i) {
    const Layer& layer = layers_[i];
    std::vector<at::Tensor> inputs = {x, layer.attention_norm, layer.qkv};
    if (delta.defined()) inputs.push_back(delta);
    const std::vector<at::Tensor> a = run(before_attention, inputs);
    const at::Tensor attended = attend(a[1], a[2], a[3], i);
    const std::vector<at::Tensor> m =
        run(after_attention, {a[0], attended, layer.out, layer.mlp_norm, layer.gate_up, layer.down});
    x = m[0];
    delta = m[1];
  }
  if (last_only) {
    x = x.view({batch, n, shape_.dim}).select(1, n - 1).contiguous();
    delta = delta.view({batch, n, shape_.dim}).select(1, n - 1).contiguous();
  }
  return add_rms_norm(x, delta, norm_, shape_.norm_eps).y;
}

}  // namespace annulus
