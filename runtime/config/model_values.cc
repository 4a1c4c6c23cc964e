// See values.h.
#include "runtime/config/values.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "common/names.h"
#include "common/text.h"

namespace annulus::config_keys {

namespace {

constexpr double kMostTheta = 1e12;  // as of model.rope_theta

// Parses a table of rotary settings, whose key `theta`, if it may have one, is written to `theta`.
RotaryScaling read_rotary(const toml::table& table, const std::string& where, double* theta) {
  using Kind = RotaryScaling::Kind;
  RotaryScaling s;
  std::vector<std::string> kinds;
  for (const Kind k : {Kind::kDefault, Kind::kLinear, Kind::kLlama3, Kind::kYarn, Kind::kNone}) {
    kinds.emplace_back(rotary_kind_name(k));
  }
  const bool plain = theta != nullptr && !table.contains("kind");  // with a theta alone
  const std::string name = plain ? kinds[0] : read_choice(table.get("kind"), kinds, where, "kind must be");
  s.kind = static_cast<Kind>(std::find(kinds.begin(), kinds.end(), name) - kinds.begin());

  std::vector<std::pair<std::string, double*>> numbers;
  if (s.kind != Kind::kDefault && s.kind != Kind::kNone) numbers.emplace_back("factor", &s.factor);
  if (s.kind == Kind::kLlama3 || s.kind == Kind::kYarn) numbers.emplace_back("original_context", &s.original_context);
  if (s.kind == Kind::kLlama3) {
    numbers.emplace_back("low_freq_factor", &s.low_freq_factor);
    numbers.emplace_back("high_freq_factor", &s.high_freq_factor);
  }
  if (s.kind == Kind::kYarn) {
    numbers.emplace_back("beta_fast", &s.beta_fast);
    numbers.emplace_back("beta_slow", &s.beta_slow);
    numbers.emplace_back("attention_factor", &s.attention_factor);
  }
  if (theta != nullptr && s.kind != Kind::kNone) numbers.emplace_back("theta", theta);
  for (const auto& [key, value] : table) {
    const std::string at = where + "." + std::string(key.str());
    if (key.str() == "kind") continue;
    if (key.str() == "truncate" && s.kind == Kind::kYarn) {
      const auto truth = value.value_exact<bool>();
      if (!truth) refuse(at, "expected true or false, got " + shown(value));
      s.truncate = *truth;
      continue;
    }
    double* to = nullptr;
    std::vector<std::string> names;
    for (const auto& [number, slot] : numbers) {
      names.push_back(number);
      if (number == key.str()) to = slot;
    }
    if (to == nullptr) {
      const std::string meant = did_you_mean(key.str(), names);
      refuse(at, "unknown key" + (meant.empty()
                                      ? ": kind \"" + name + "\" has " + (names.empty() ? "none" : join(names, ", "))
                                      : meant));
    }
    const auto whole = value.value_exact<int64_t>();
    const auto number = whole ? std::optional<double>(static_cast<double>(*whole)) : value.value_exact<double>();
    if (!number) refuse_type(at, "a number", value);
    *to = *number;
  }
  validate(s, where);
  if (table.contains("theta") && !(*theta > 0 && *theta <= kMostTheta)) {
    refuse(where + ".theta", "expected above 0, at most 1000000000000, got " + toml_number(*theta));
  }
  return s;
}

}  // namespace

RotaryScaling read_rotary_scaling(const toml::node& node, const std::string& where) {
  const toml::table* table = node.as_table();
  if (!table) {
    refuse_type(where, R"(a table such as { kind = "yarn", factor = 4.0, original_context = 8192 })", node);
  }
  return read_rotary(*table, where, nullptr);
}

LayerRotaries read_layer_rotaries(const toml::node& node, const std::string& where) {
  const toml::array* list = node.as_array();
  if (!list) refuse_type(where, R"(a list of tables such as [{ theta = 1e4 }, {}, { kind = "none" }])", node);
  LayerRotaries layers;
  for (const toml::node& element : *list) {
    const std::string at = where + "[" + std::to_string(layers.cycle.size()) + "]";
    const toml::table* table = element.as_table();
    if (!table) refuse_type(at, R"(a table such as { theta = 1e4 }, {} or { kind = "none" })", element);
    LayerRotary layer;
    layer.own = !table->empty();
    if (layer.own) layer.scaling = read_rotary(*table, at, &layer.theta);
    layers.cycle.push_back(layer);
  }
  return layers;
}

LayerSwitch read_layer_switch(const toml::node& node, const std::string& where) {
  constexpr const char* kExpected = "true or false, or a list of them that repeats over the layers";
  if (const auto all = node.value_exact<bool>()) return *all;
  const toml::array* list = node.as_array();
  if (!list) refuse_type(where, kExpected, node);
  if (list->empty()) refuse(where, std::string("expected ") + kExpected + ", got an empty list");
  std::vector<bool> each;
  for (const toml::node& element : *list) {
    const auto one = element.value_exact<bool>();
    if (!one) refuse_type(where + "[" + std::to_string(each.size()) + "]", "true or false", element);
    each.push_back(*one);
  }
  return each;
}

}  // namespace annulus::config_keys
