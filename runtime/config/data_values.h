// Reads those values of [data] and [optimizer] that are not single numbers or strings, and describes TOML nodes in
// words for messages. Used by reading.cc and model_values.cc. Internal to runtime/config/.
#pragma once

#include <toml++/toml.h>

#include <string>
#include <string_view>

#include "runtime/config/config.h"

namespace annulus::config_keys {

// What a node is, in words: "a table", "a whole number".
std::string_view type_name(const toml::node& node);
// The value as the user wrote it, for messages. Long values are cut.
std::string shown(const toml::node& node);
// Raises Error(kUsage).
[[noreturn]] void refuse(const std::string& where, const std::string& message);

// Read data.train, data.context, data.accumulate and optimizer.groups. `where`: "file:line: key", for messages. Raise
// Error(kUsage).
Sources read_sources(const toml::node& node, const std::string& where);
ContextSchedule read_contexts(const toml::node& node, const std::string& where);
AccumulateSchedule read_accumulate(const toml::node& node, const std::string& where);
ParameterGroups read_groups(const toml::node& node, const std::string& where);

}  // namespace annulus::config_keys
