// See model_shape.h.
#include "runtime/model/model_shape.h"

#include <algorithm>
#include <cmath>

#include "common/error.h"
#include "common/text.h"

namespace annulus {
namespace {

constexpr double kStd = 0.02;

void require(bool ok, const std::string& message) {
  if (!ok) throw Error(ErrorKind::kPlan, "model", message);
}

ParameterShape matrix(std::string name, int64_t out, int64_t in, double std = kStd) {
  return {.name = std::move(name), .shape = {out, in}, .std = std};
}

ParameterShape vector(std::string name, int64_t n, double value) {
  return {.name = std::move(name), .shape = {n}, .std = 0, .value = value};
}

// The weight of a norm, which begins by multiplying by 1.
ParameterShape norm(const ModelShape& s, std::string name, int64_t n) {
  return vector(std::move(name), n, 1 - s.norm_offset());
}

DescribedUnit embedding(const ModelShape& s) {
  return {"the embedding", {matrix("model.embed_tokens.weight", s.vocab, s.dim)}};
}

std::string layer_prefix(int64_t i) { return "model.layers." + std::to_string(i) + "."; }

DescribedUnit before_attention(const ModelShape& s, int64_t i) {
  const std::string prefix = layer_prefix(i), attention = prefix + "self_attn.";
  DescribedUnit group{
      "q, k and v of layer " + std::to_string(i),
      {matrix(attention + "q_proj.weight", s.q_width(), s.dim),
       matrix(attention + "k_proj.weight", s.kv_width(), s.dim),
       matrix(attention + "v_proj.weight", s.kv_width(), s.dim), norm(s, prefix + "input_layernorm.weight", s.dim)}};
  std::vector<ParameterShape>& p = group.parameters;
  if (s.qkv_bias) {
    p.push_back(vector(attention + "q_proj.bias", s.q_width(), 0));
    p.push_back(vector(attention + "k_proj.bias", s.kv_width(), 0));
    p.push_back(vector(attention + "v_proj.bias", s.kv_width(), 0));
  }
  if (s.qk_norm) {
    p.push_back(norm(s, attention + "q_norm.weight", s.head_dim()));
    p.push_back(norm(s, attention + "k_norm.weight", s.head_dim()));
  }
  if (s.attention_sinks.of(i)) p.push_back(vector(attention + "sinks", s.heads, 0));
  return group;
}

DescribedUnit after_attention(const ModelShape& s, int64_t i) {
  // Matrices whose results are added to the residual stream begin smaller, by the number of additions (Radford et al.
  // 2019).
  const double residual = kStd / std::sqrt(2.0 * static_cast<double>(s.layers));
  const std::string prefix = layer_prefix(i), out = prefix + "self_attn.o_proj.", mlp = prefix + "mlp.";
  DescribedUnit group{
      "the output projection and MLP of layer " + std::to_string(i),
      {matrix(out + "weight", s.dim, s.q_width(), residual), matrix(mlp + "gate_proj.weight", s.ffn, s.dim),
       matrix(mlp + "up_proj.weight", s.ffn, s.dim), matrix(mlp + "down_proj.weight", s.dim, s.ffn, residual),
       norm(s, prefix + mlp_norm_name(s), s.dim)}};
  std::vector<ParameterShape>& p = group.parameters;
  if (s.post_norms) {
    p.push_back(norm(s, prefix + kAttentionPostNorm, s.dim));
    p.push_back(norm(s, prefix + kMlpPostNorm, s.dim));
  }
  if (s.out_bias) p.push_back(vector(out + "bias", s.dim, 0));
  if (s.mlp_bias) {
    p.push_back(vector(mlp + "gate_proj.bias", s.ffn, 0));
    p.push_back(vector(mlp + "up_proj.bias", s.ffn, 0));
    p.push_back(vector(mlp + "down_proj.bias", s.dim, 0));
  }
  return group;
}

DescribedUnit output(const ModelShape& s) { return {"the output", {matrix("lm_head.weight", s.vocab, s.dim)}}; }

template <typename Number>
Number elements(const DescribedUnit& group, bool matrices_only = false) {
  Number sum = 0;
  for (const ParameterShape& p : group.parameters) {
    if (matrices_only && p.shape.size() < 2) continue;
    Number count = 1;
    for (const int64_t size : p.shape) count *= static_cast<Number>(size);
    sum += count;
  }
  return sum;
}

template <typename Number>
Number elements_of_layers(const ModelShape& s, bool matrices_only = false) {
  const auto of_layer = [&](bool sinks) {
    ModelShape alike = s;
    alike.attention_sinks = sinks;
    return elements<Number>(before_attention(alike, 0), matrices_only) +
           elements<Number>(after_attention(alike, 0), matrices_only);
  };
  const Number with = of_layer(true), without = of_layer(false);
  const auto cycle = static_cast<int64_t>(s.attention_sinks.cycle.size());
  Number sum = 0;
  for (int64_t i = 0; i < cycle; ++i) {
    const int64_t layers = s.layers / cycle + (i < s.layers % cycle ? 1 : 0);
    sum += static_cast<Number>(layers) * (s.attention_sinks.of(i) ? with : without);
  }
  return sum;
}

template <typename Number>
Number count_of(const ModelShape& s) {
  return elements<Number>(embedding(s)) + elements_of_layers<Number>(s) + static_cast<Number>(s.dim) +
         (s.tie_embeddings ? 0 : elements<Number>(output(s)));
}

}  // namespace

void validate(const ModelShape& s) {
  require(s.layers > 0 && s.dim > 0 && s.heads > 0 && s.kv_heads > 0 && s.ffn > 0 && s.vocab > 0 && s.head_size >= 0,
          "layers, dim, heads, kv_heads, ffn and vocab must be positive, but are " + std::to_string(s.layers) + ", " +
              std::to_string(s.dim) + ", " + std::to_string(s.heads) + ", " + std::to_string(s.kv_heads) + ", " +
              std::to_string(s.ffn) + ", " + std::to_string(s.vocab));
  require(s.head_size > 0 || s.dim % (2 * s.heads) == 0, "dim " + std::to_string(s.dim) + " does not give " +
                                                             counted(s.heads, "head") +
                                                             " of an even dimension: make model.dim a multiple of " +
                                                             std::to_string(2 * s.heads) + ", or set model.head_dim");
  require(s.head_dim() % 2 == 0, "model.head_dim must be even, but is " + std::to_string(s.head_dim()) +
                                     ": the rotary embedding rotates pairs of numbers");
  require(s.softcap == 0 || (s.softcap >= 1e-30 && s.softcap <= 1e30),
          "model.softcap must be from 1e-30 to 1e30, or 0 for none, but is " + exact(s.softcap));
  require(s.heads % s.kv_heads == 0, counted(s.heads, "query head") + " cannot share " +
                                         counted(s.kv_heads, "kv head") +
                                         " evenly: model.heads must be a multiple of model.kv_heads");
  const auto rotaries = static_cast<int64_t>(s.rope_layers.cycle.size());
  require(rotaries <= s.layers, "model.rope_layers lists " + counted(rotaries, "rotary setting") + " for " +
                                    counted(s.layers, "layer") + ": expected at most one for each layer");
  const auto sinks = static_cast<int64_t>(s.attention_sinks.cycle.size());
  require(sinks > 0 && (sinks == 1 || sinks <= s.layers), "model.attention_sinks lists " + counted(sinks, "value") +
                                                              " for " + counted(s.layers, "layer") +
                                                              ": expected at most one for each layer");
}

std::string mlp_norm_name(const ModelShape& s) {
  return s.post_norms ? "pre_feedforward_layernorm.weight" : "post_attention_layernorm.weight";
}

std::string LayerSwitch::text() const {
  const auto word = [](bool on) { return std::string(on ? "true" : "false"); };
  if (cycle.size() == 1) return word(cycle[0]);
  std::vector<std::string> words;
  for (const bool on : cycle) words.push_back(word(on));
  return "[" + join(words, ", ") + "]";
}

std::string LayerRotaries::text() const {
  std::vector<std::string> texts;
  for (const LayerRotary& layer : cycle) {
    if (!layer.own) {
      texts.emplace_back("{}");
      continue;
    }
    std::string text = layer.scaling.text();
    if (layer.theta > 0) text.insert(text.size() - 2, ", theta = " + toml_number(layer.theta));
    texts.push_back(std::move(text));
  }
  return "[" + join(texts, ", ") + "]";
}

RotarySpec ModelShape::rotary(int64_t layer) const {
  RotarySpec spec = rotary();
  if (rope_layers.cycle.empty()) return spec;
  const LayerRotary& of = rope_layers.cycle[static_cast<size_t>(layer) % rope_layers.cycle.size()];
  if (!of.own) return spec;
  if (of.theta > 0) spec.theta = of.theta;
  spec.scaling = of.scaling;
  return spec;
}

ModelShape::Rotaries ModelShape::rotaries() const {
  Rotaries all;
  for (int64_t layer = 0; layer < layers; ++layer) {
    const RotarySpec spec = rotary(layer);
    const auto found = std::find(all.distinct.begin(), all.distinct.end(), spec);
    all.of_layer.push_back(static_cast<size_t>(found - all.distinct.begin()));
    if (found == all.distinct.end()) all.distinct.push_back(spec);
  }
  return all;
}

std::string ModelShape::Rotaries::text() const {
  std::string text;
  for (const RotarySpec& spec : distinct) text += spec.text() + "; ";
  for (const size_t of : of_layer) text += " " + std::to_string(of);
  return text;
}

int64_t ParameterShape::count() const {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return count;
}

std::vector<DescribedUnit> described_units(const ModelShape& s) {
  std::vector<DescribedUnit> groups = {embedding(s)};
  for (int64_t i = 0; i < s.layers; ++i) {
    groups.push_back(before_attention(s, i));
    groups.push_back(after_attention(s, i));
  }
  groups.back().parameters.push_back(norm(s, "model.norm.weight", s.dim));
  if (!s.tie_embeddings) groups.push_back(output(s));
  return groups;
}

int64_t parameter_count(const ModelShape& s) { return count_of<int64_t>(s); }
double parameter_estimate(const ModelShape& s) { return count_of<double>(s); }

double flops_per_token(const ModelShape& s, double pairs) {
  const double weights = elements_of_layers<double>(s, /*matrices_only=*/true) + elements<double>(output(s));
  return 6 * weights + 12 * static_cast<double>(s.head_dim()) * pairs;
}

}  // namespace annulus
