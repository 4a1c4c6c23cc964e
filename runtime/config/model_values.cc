// See model_values.h.
#include "runtime/config/model_values.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "common/nearest.h"
#include "common/text.h"
#include "runtime/config/data_values.h"

namespace annulus::config_keys {

RotaryScaling read_rotary_scaling(const toml::node& node, const std::string& where) {
  using Kind = RotaryScaling::Kind;
  const std::string expected = R"(a table such as { kind = "yarn", factor = 4.0, original_context = 8192 })";
  const toml::table* table = node.as_table();
  if (!table) refuse_type(where, expected, node);

  RotaryScaling s;
  std::vector<std::string> kinds;
  for (const Kind k : {Kind::kDefault, Kind::kLinear, Kind::kLlama3, Kind::kYarn}) {
    kinds.emplace_back(rotary_kind_name(k));
  }
  const std::string name = read_choice(table->get("kind"), kinds, where, "kind must be");
  s.kind = static_cast<Kind>(std::find(kinds.begin(), kinds.end(), name) - kinds.begin());

  std::vector<std::pair<std::string, double*>> numbers;
  if (s.kind != Kind::kDefault) numbers.emplace_back("factor", &s.factor);
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
  for (const auto& [key, value] : *table) {
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
  return s;
}

}  // namespace annulus::config_keys
