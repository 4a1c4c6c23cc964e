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
void check_keys(const ConfigReader& rope, const nlohmann::json& object, Kind kind) {
  const std::vector<std::string_view> own = keys_of(kind);
  for (const auto& [name, value] : object.items()) {
    if (value.is_null() || name == "rope_type" || name == "type" || name == "rope_theta") continue;
    if (std::find(own.begin(), own.end(), name) != own.end()) continue;
    const ConfigKey* key = find_config_key("rope_parameters." + name);
    if (key == nullptr) rope.refuse(name, "is not known: it might change what the model computes");
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

}  // namespace

void read_rope(const ConfigReader& config, int64_t context, ModelShape& shape) {
  const auto object_at = [&](const char* key) -> const nlohmann::json* {
    const nlohmann::json* value = config.find(key);
    if (value != nullptr && !value->is_object()) config.refuse(key, "must be an object, but is " + shown(*value));
    return value == nullptr || value->empty() ? nullptr : value;
  };
  const nlohmann::json *older = object_at("rope_scaling"), *newer = object_at("rope_parameters");
  if (older != nullptr && newer != nullptr && *older != *newer) {
    config.refuse("rope_scaling", "differs from \"rope_parameters\": leave one of them out");
  }
  const std::string name = older != nullptr ? "rope_scaling." : "rope_parameters.";
  const nlohmann::json none = nlohmann::json::object();
  const nlohmann::json& object = older != nullptr ? *older : newer != nullptr ? *newer : none;
  const ConfigReader rope(config.path(), object, name);

  const Kind kind = kind_of(rope);
  check_keys(rope, object, kind);
  const double beside = config.number("rope_theta", kLeast, kMost, 10000);
  shape.rope_theta = rope.number("rope_theta", kLeast, kMost, beside);
  if (config.find("rope_theta") != nullptr && beside != shape.rope_theta) {
    config.refuse("rope_theta", "is " + exact(beside) + ", but \"" + name + "rope_theta\" is " +
                                    exact(shape.rope_theta) + ": leave one of them out");
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
  shape.rope_scaling = s;
}

void write_rope(const ModelShape& shape, nlohmann::ordered_json& config) {
  const RotaryScaling& s = shape.rope_scaling;
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
  const bool newer = config.contains("rope_parameters");
  for (const char* key : {"rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings"}) {
    config.erase(key);
  }
  if (newer) {
    rope["rope_theta"] = shape.rope_theta;
    config["rope_parameters"] = rope;
    return;
  }
  config["rope_theta"] = shape.rope_theta;
  config["rope_scaling"] = s.kind == Kind::kDefault ? nlohmann::ordered_json() : rope;
}

}  // namespace annulus::huggingface
