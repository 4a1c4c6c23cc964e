// See model_config.h. This file writes config.json.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>

#include "common/error.h"
#include "runtime/huggingface/families.h"
#include "runtime/huggingface/model_config.h"
#include "runtime/huggingface/rope_config.h"

namespace annulus {

using namespace huggingface;  // NOLINT(google-build-using-namespace): this file belongs to it

namespace {

using OrderedJson = nlohmann::ordered_json;

[[noreturn]] void refuse_export(const std::string& message) { throw Error(ErrorKind::kUsage, "huggingface", message); }

bool same_patterns(const ModelSection& a, const ModelSection& b) {
  for (int64_t i = 0; i < a.layers; ++i) {
    if (window_of(a, i) < 0 || window_of(a, i) != window_of(b, i)) return false;
  }
  return true;
}

bool same_rotaries(ModelSection a, ModelSection b) {
  a.rope_fp32 = b.rope_fp32 = false;  // config.json does not say it
  return a.rotaries().text() == b.rotaries().text();
}

// What differs between two models, of all that a config.json says; empty: nothing.
std::string difference(const ModelSection& a, const ModelSection& b, bool patterns) {
  ModelShape x = a, y = b;
  x.rope_fp32 = y.rope_fp32 = false;  // config.json does not say it
  x.head_size = a.head_dim();
  y.head_size = b.head_dim();
  x.rope_theta = y.rope_theta;
  x.rope_scaling = y.rope_scaling;
  x.rope_layers = y.rope_layers;
  x.query_pre_attn_scalar = y.query_pre_attn_scalar;
  if (!(x == y) || a.score_divisor() != b.score_divisor()) return "its sizes, biases or norms";
  if (!same_rotaries(a, b)) return "its rotary embedding";
  if (a.dropout != b.dropout) return "its dropout";
  return patterns && !same_patterns(a, b) ? "its patterns" : "";
}

// The family for a model that was trained from scratch.
const Family& simplest(const ModelSection& model, bool patterns) {
  std::string reasons, by_patterns;
  for (const Family& family : families()) {
    const std::string reason = why_not(family, model, patterns);
    if (reason.empty()) return family;
    reasons += "; " + reason;
    if (by_patterns.empty() && why_not(family, model, false).empty()) by_patterns = reason;
  }
  if (!by_patterns.empty()) refuse_export(by_patterns + "; export with --leave-pattern to leave the patterns out");
  refuse_export("no family can express this model" + reasons);
}

OrderedJson of_sizes(const Family& family, const ModelSection& m) {
  OrderedJson config = {{"architectures", {family.architecture}},
                        {"model_type", family.name},
                        {"vocab_size", m.vocab},
                        {"hidden_size", m.dim},
                        {"intermediate_size", m.ffn},
                        {"num_hidden_layers", m.layers},
                        {"num_attention_heads", m.heads},
                        {"num_key_value_heads", m.kv_heads},
                        {"head_dim", m.head_dim()},
                        {"rms_norm_eps", m.norm_eps},
                        {"tie_word_embeddings", m.tie_embeddings},
                        {"attention_dropout", 0.0},
                        {"bos_token_id", nullptr},
                        {"eos_token_id", nullptr},
                        {"pad_token_id", nullptr}};  // some families have one by default, perhaps beyond the ids
  if (family.bias_key) config["attention_bias"] = m.qkv_bias;
  if (family.mlp_bias_key) config["mlp_bias"] = m.mlp_bias;
  if (family.gemma) {
    config["hidden_activation"] = "gelu_pytorch_tanh";
    config["query_pre_attn_scalar"] = std::llround(m.score_divisor());
  } else {
    config["hidden_act"] = "silu";
  }
  return config;
}

void write_patterns(const Family& family, const ModelSection& m, bool leave, OrderedJson& config) {
  if (family.windows == Windows::kNone) return;
  int64_t window = 0, full = 0, first = m.layers;
  OrderedJson types = OrderedJson::array();
  for (int64_t i = 0; i < m.layers; ++i) {
    const int64_t w = leave ? 0 : window_of(m, i);
    types.push_back(w > 0 ? "sliding_attention" : "full_attention");
    if (w > 0) first = std::min(first, i);
    full += w > 0 ? 0 : 1;
    window = std::max(window, w);
  }
  // Gemma needs a window even if no layer has it, since transformers makes its mask in any case.
  if (family.rotaries == Rotaries::kByWindow && window == 0) window = family.window;
  config["sliding_window"] = window > 0 ? OrderedJson(window) : OrderedJson();
  if (family.windows == Windows::kAllLayers) return;
  if (family.window_switch) config["use_sliding_window"] = window > 0;
  // Versions without layer_types know only a number of full layers at the beginning.
  if (family.rotaries == Rotaries::kAlike) config["max_window_layers"] = full == first ? first : m.layers;
  config["layer_types"] = types;
}

}  // namespace

std::string write_model_config(const ConfigToWrite& to) {
  const ModelSection& m = to.model;
  const bool here = to.original.empty();
  OrderedJson config;
  const Family* family = nullptr;
  ModelSection before;
  if (here) {
    family = &simplest(m, !to.leave_pattern);
    config = of_sizes(*family, m);
    if (to.begin) config["bos_token_id"] = *to.begin;
    if (to.end) config["eos_token_id"] = *to.end;
    write_patterns(*family, m, to.leave_pattern, config);
  } else {
    const FolderConfig original = parse_folder_config(to.original, "the config.json that the model was imported with");
    before = original.model;
    config = OrderedJson::parse(to.original);
    family = &*std::ranges::find_if(families(), [&](const Family& f) { return f.name == original.family; });
    const std::string reason = why_not(*family, m, !to.leave_pattern);
    if (!reason.empty()) {
      refuse_export(reason + (why_not(*family, m, false).empty()
                                  ? "; export with --leave-pattern to leave the patterns as they were imported"
                                  : ""));
    }
    if (!to.leave_pattern && !same_patterns(m, before)) write_patterns(*family, m, false, config);
  }
  if (here || m.dropout != before.dropout) config["attention_dropout"] = m.dropout;
  config["max_position_embeddings"] = to.context;
  const auto read = [&] { return parse_folder_config(config.dump(), "the config.json to be written").model; };
  // Rotary parameters of the original that depend on the context are written out.
  if (here) {
    write_rope(*family, m, config);
  } else if (!same_rotaries(read(), m)) {
    write_rope(*family, m, config);
  }
  const char* const dtype = to.dtype == "bf16" ? "bfloat16" : to.dtype == "fp64" ? "float64" : "float32";
  if (config.contains("dtype")) config["dtype"] = dtype;
  if (config.contains("torch_dtype") || !config.contains("dtype")) config["torch_dtype"] = dtype;
  if (const std::string other = difference(m, read(), !to.leave_pattern); !other.empty()) {
    throw Error(ErrorKind::kInternal, "huggingface",
                "the config.json of this model reads as another one: " + other + " would not be the same");
  }
  return config.dump(2) + "\n";
}

}  // namespace annulus
