// Every key of a configuration: its name, where its value lies in a Config, its range and its line of documentation.
// They are one table (keys.cc), which reading.cc and writing.cc go through. Internal to runtime/config/.
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

// Where a key's value lies in a Config, and its type.
using Slot = std::variant<int64_t*, double*, bool*, std::string*, std::vector<int64_t>*, Sources*, ContextSchedule*,
                          AccumulateSchedule*, ParameterGroups*, LayerPatterns*, RotaryScaling*>;
// A copy of such a value.
using Value = std::variant<int64_t, double, bool, std::string, std::vector<int64_t>, Sources, ContextSchedule,
                           AccumulateSchedule, ParameterGroups, LayerPatterns, RotaryScaling>;

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
  Range range = {};
  std::vector<std::string> choices = {};                                 // the strings allowed; empty: all
  void (*check)(const std::string& value, std::string_view where) = {};  // a further check of a string
  bool of_model = false;  // weights trained with one value are meaningless with another
  bool imported = false;  // given by the folder that model.from names; another value is refused
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

// The table, in the order in which a configuration is written. Thread-safe.
const std::vector<Key>& keys();

const Key* find_key(std::string_view full);  // null if no key has this name
Value value_of(const Key& key, const Config& config);

// Describes the values that a key takes: "1 or more", "one of "a", "b"". `whole`: they are whole numbers. `refused`:
// the value that was refused; an upper bound far beyond any use is named only if this value exceeds it.
std::string range_text(const Key& key, bool whole, double refused = 0);

// Raises Error(kUsage).
void check_not_empty(const std::string& value, std::string_view where);

// The key's value as TOML.
std::string value_text(const Key& key, const Config& config);

}  // namespace annulus::config_keys
