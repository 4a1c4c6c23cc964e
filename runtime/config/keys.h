// The table of configuration keys (keys.cc): the name, the field of Config, the range and the documentation of each.
// reading.cc and writing.cc iterate over it. Internal to runtime/config/.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "runtime/config/config.h"

namespace annulus::config_keys {

// A pointer to a key's field in a Config.
using Slot = std::variant<int64_t*, double*, bool*, std::string*, std::vector<int64_t>*, std::vector<std::string>*,
                          Sources*, ContextSchedule*, AccumulateSchedule*, ParameterGroups*, LayerPatterns*,
                          RotaryScaling*, LayerRotaries*, LayerSwitch*, Activation*>;
// The value of such a field.
using Value = std::variant<int64_t, double, bool, std::string, std::vector<int64_t>, std::vector<std::string>, Sources,
                           ContextSchedule, AccumulateSchedule, ParameterGroups, LayerPatterns, RotaryScaling,
                           LayerRotaries, LayerSwitch, Activation>;

struct Range {
  double low = -std::numeric_limits<double>::infinity();
  double high = std::numeric_limits<double>::infinity();
  bool low_in = true;
  bool high_in = true;

  bool holds(double v) const {  // false for NaN
    return std::isfinite(v) && (low_in ? v >= low : v > low) && (high_in ? v <= high : v < high);
  }
};

// Which values a key takes, and what they decide.
struct Rules {
  bool required = false;
  std::string_view example = {};  // of a required key, as TOML; together they make a small model
  Range range = {};
  std::vector<std::string> choices = {};                                 // allowed strings; empty: all
  void (*check)(const std::string& value, std::string_view where) = {};  // another check of a string
  bool of_model = false;       // weights trained with one value are meaningless with another
  bool imported = false;       // determined by the folder model.from; another value is rejected
  std::string_view also = {};  // another name of the key in its section
};

struct Key {
  std::string_view section;  // "" for the top level
  std::string_view name;
  Slot (*slot)(Config&);
  std::string_view doc;
  Rules rules = {};

  std::string full() const {
    return section.empty() ? std::string(name) : std::string(section) + "." + std::string(name);
  }
};

// Returns the table, in the order of a written configuration. Thread safe.
const std::vector<Key>& keys();

const Key* find_key(std::string_view full);  // by either of its names; null if unknown
Value value_of(const Key& key, const Config& config);

// Describes the allowed values of a key: "1 or more", "one of "a", "b"". `whole`: they are integers. `refused`: the
// rejected value; an upper bound far beyond any use is mentioned only if this value exceeds it.
std::string range_text(const Key& key, bool whole, double refused = 0);

// Raises Error(kUsage) for an empty string.
void check_not_empty(const std::string& value, std::string_view where);

// Returns the key's value as TOML.
std::string value_text(const Key& key, const Config& config);

}  // namespace annulus::config_keys
