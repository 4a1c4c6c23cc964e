// See rope_config.h.
#include "runtime/huggingface/rope_config.h"

#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "common/checked_json.h"
#include "common/error.h"
#include "common/text.h"
#include "runtime/huggingface/config_keys.h"

namespace annulus::huggingface {
namespace {

using Kind = RotaryScaling::Kind;
constexpr double kMost = 1e12;  // far beyond any position or base
constexpr double kLeast = std::numeric_limits<double>::min();

// The keys of a kind besides those that every kind has.
std::vector<std::string_view> keys_of(Kind kind) {
  switch (kind) {
    case Kind::kLinear:
      return {"factor"};
    case Kind::kLlama3:
      return {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"};
    case Kind::kYarn:
      return {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"};
    case Kind::kDefault:
    case Kind::kNone:
      break;
  }
  return {};
}

Kind kind_of(const ConfigReader& rope) {
  const std::string type = rope.text("type", ""), name = rope.text("rope_type", type.empty() ? "default" : type);
  if (!type.empty() && type != name) {
    rope.refuse("type",
                "is " + shown_name(type) + ", but rope_type is " + shown_name(name) + ": leave one of them out");
  }
  for (const Kind kind : {Kind::kDefault, Kind::kLinear, Kind::kLlama3, Kind::kYarn}) {
    if (name == rotary_kind_name(kind)) return kind;
  }
  rope.refuse(rope.has("rope_type") ? "rope_type" : "type",
              "is " + shown_name(name) + ": only \"default\", \"linear\", \"llama3\" and \"yarn\" are supported");
}

// Checks that every key is known, and that none asks for a computation that is not supported.
void check_keys(const ConfigReader& rope, const nlohmann::json& object, const Family& family, Kind kind) {
  const std::vector<std::string_view> own = keys_of(kind);
  for (const auto& [name, value] : object.items()) {
    if (value.is_null() || name == "rope_type" || name == "type" || name == "rope_theta") continue;
    if (std::find(own.begin(), own.end(), name) != own.end()) continue;
    const ConfigKey* key = find_config_key("rope_parameters." + name);
    if (key == nullptr) rope.refuse(name, "is not known: it might change what the model computes");
    if (!is_of_family(*key, family.name)) rope.refuse(name, "is no key of " + std::string(family.name));
    if (name == "mscale" || name == "mscale_all_dim") {
      // transformers uses the two only together, and only if attention_factor is not given.
      const auto says = [&](const char* of) { return rope.number(of, 0, kMost, 0) != 0; };
      if (kind != Kind::kYarn || !says("mscale") || !says("mscale_all_dim") ||
          rope.find("attention_factor") != nullptr) {
        continue;
      }
    }
    if (key->use == KeyUse::kRefused) rope.refuse(name, "is not supported: " + std::string(key->doc));
    if (key->use == KeyUse::kChecked) {
      if (!value.is_number() || value.get<double>() != 1) {
        rope.refuse(name, "must be 1, but is " + shown(value) + ": " + std::string(key->doc));
      }
    }
    // What is left belongs to another kind, and transformers does not read it either.
  }
}

// An object that may be missing, null or empty, which is null.
const nlohmann::json* object_at(const ConfigReader& config, const char* key) {
  const nlohmann::json* value = config.find(key);
  if (value != nullptr && !value->is_object()) config.refuse(key, "must be an object, but is " + shown(*value));
  return value == nullptr || value->empty() ? nullptr : value;
}

// The members of `object`, which are called `name`, of a rotary embedding. Its theta may also stand beside them as
// `beside`; if it stands nowhere, it is `otherwise`.
LayerRotary read_rotary(const ConfigReader& config, const Family& family, const nlohmann::json& object,
                        const std::string& name, const char* beside, double otherwise, int64_t context) {
  const ConfigReader rope(config.path(), object, name);
  const Kind kind = kind_of(rope);
  check_keys(rope, object, family, kind);
  const double theta_beside = config.number(beside, kLeast, kMost, otherwise);
  const double theta = rope.number("rope_theta", kLeast, kMost, theta_beside);
  if (config.find(beside) != nullptr && theta_beside != theta) {
    config.refuse(beside, "is " + exact(theta_beside) + ", but \"" + name + "rope_theta\" is " + exact(theta) +
                              ": leave one of them out");
  }
  RotaryScaling s{.kind = kind};
  if (kind == Kind::kLlama3 || kind == Kind::kYarn) {
    const int64_t most = static_cast<int64_t>(kMost);
    const int64_t inside = rope.whole("original_max_position_embeddings", 1, most, context);
    s.original_context = static_cast<double>(config.whole("original_max_position_embeddings", 1, most, inside));
  }
  if (kind != Kind::kDefault) {
    const auto by_contexts =
        kind == Kind::kYarn ? std::optional<double>(static_cast<double>(context) / s.original_context) : std::nullopt;
    s.factor = rope.number("factor", 1, kMost, by_contexts);
  }
  if (kind == Kind::kLlama3) {
    s.low_freq_factor = rope.number("low_freq_factor", kLeast, kMost);
    s.high_freq_factor = rope.number("high_freq_factor", kLeast, kMost);
  }
  if (kind == Kind::kYarn) {
    const auto or_else = [](double value, double otherwise) { return value == 0 ? otherwise : value; };
    s.beta_fast = or_else(rope.number("beta_fast", 0, kMost, 0), 32);
    s.beta_slow = or_else(rope.number("beta_slow", 0, kMost, 0), 1);
    s.attention_factor = rope.number("attention_factor", kLeast, kMost, 0);
    s.truncate = rope.flag("truncate", true);
  }
  try {
    validate(s, config.path() + ": \"" + name.substr(0, name.size() - 1) + "\"");
  } catch (const Error& error) {
    throw Error(ErrorKind::kInput, "huggingface", std::string(error.message()));
  }
  return {.own = true, .theta = theta, .scaling = s};
}

constexpr const char *kFull = "full_attention", *kSliding = "sliding_attention";

nlohmann::ordered_json written(const RotaryScaling& s) {
  nlohmann::ordered_json rope = nlohmann::ordered_json::object();
  rope["rope_type"] = rotary_kind_name(s.kind);
  if (s.kind != Kind::kDefault) rope["factor"] = s.factor;
  if (s.kind == Kind::kLlama3 || s.kind == Kind::kYarn) {
    rope["original_max_position_embeddings"] = std::llround(s.original_context);
  }
  if (s.kind == Kind::kLlama3) {
    rope["low_freq_factor"] = s.low_freq_factor;
    rope["high_freq_factor"] = s.high_freq_factor;
  }
  if (s.kind == Kind::kYarn) {
    rope["beta_fast"] = s.beta_fast;
    rope["beta_slow"] = s.beta_slow;
    if (s.attention_factor > 0) rope["attention_factor"] = s.attention_factor;
    if (!s.truncate) rope["truncate"] = false;
  }
  return rope;
}

nlohmann::ordered_json written_with_theta(const RotarySpec& spec) {
  nlohmann::ordered_json rope = written(spec.scaling);
  rope["rope_theta"] = spec.theta;
  return rope;
}

}  // namespace

LayerRotary read_rope(const ConfigReader& config, const Family& family, int64_t context, ModelShape& shape) {
  const nlohmann::json *older = object_at(config, "rope_scaling"), *newer = object_at(config, "rope_parameters");
  const bool by_window = family.rotaries == Rotaries::kByWindow;
  if (older != nullptr && newer != nullptr && (by_window || *older != *newer)) {
    config.refuse("rope_scaling", by_window ? "is given beside \"rope_parameters\": leave one of them out"
                                            : "differs from \"rope_parameters\": leave one of them out");
  }
  const nlohmann::json none = nlohmann::json::object();
  std::string name = older != nullptr ? "rope_scaling." : "rope_parameters.";
  const nlohmann::json *full = older != nullptr ? older : newer, *sliding = nullptr;
  if (by_window && newer != nullptr) {
    const ConfigReader kinds(config.path(), *newer, name);
    for (const auto& [kind, value] : newer->items()) {
      if (kind != kFull && kind != kSliding) {
        kinds.refuse(kind, "is none of the two kinds of layers: expected \"full_attention\" or \"sliding_attention\"");
      }
    }
    full = object_at(kinds, kFull), sliding = object_at(kinds, kSliding);
    name += "full_attention.";
  }
  const LayerRotary of_full =
      read_rotary(config, family, full != nullptr ? *full : none, name, "rope_theta", family.rope_theta, context);
  shape.rope_theta = of_full.theta;
  shape.rope_scaling = of_full.scaling;
  if (!by_window) return {};
  return read_rotary(config, family, sliding != nullptr ? *sliding : none, "rope_parameters.sliding_attention.",
                     "rope_local_base_freq", 10000, context);
}

void write_rope(const Family& family, const ModelSection& model, nlohmann::ordered_json& config) {
  const RotarySpec full = rotary_of(family, model, false), sliding = rotary_of(family, model, true);
  const bool by_window = family.rotaries == Rotaries::kByWindow;
  const bool newer = config.contains("rope_parameters") || (by_window && sliding.scaling.kind != Kind::kDefault);
  for (const char* key :
       {"rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq", "original_max_position_embeddings"}) {
    config.erase(key);
  }
  if (newer && by_window) {
    config["rope_parameters"] = {{kFull, written_with_theta(full)}, {kSliding, written_with_theta(sliding)}};
  } else if (newer) {
    config["rope_parameters"] = written_with_theta(full);
  } else {
    config["rope_theta"] = full.theta;
    config["rope_scaling"] = full.scaling.kind == Kind::kDefault ? nlohmann::ordered_json() : written(full.scaling);
    if (by_window) config["rope_local_base_freq"] = sliding.theta;
  }
  if (family.rotaries != Rotaries::kOrNone) return;
  config["no_rope_layers"] = nlohmann::ordered_json::array();
  for (int64_t i = 0; i < model.layers; ++i) {
    config["no_rope_layers"].push_back(model.rotary(i).scaling.kind == Kind::kNone ? 0 : 1);
  }
}

}  // namespace annulus::huggingface
