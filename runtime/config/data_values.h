// Parses the structured values of [data] and [optimizer], and describes TOML nodes for messages. Used by reading.cc and
// model_values.cc. Internal to runtime/config/.
#pragma once

#include <string>
#include <string_view>

#include "common/toml.h"
#include "runtime/config/config.h"

namespace annulus::config_keys {

// Returns the type of a node, for messages: "a table", "a whole number".
std::string_view type_name(const toml::node& node);
// Returns the value as written by the user, for messages, truncated if it is long.
std::string shown(const toml::node& node);
// Raises Error(kUsage), "WHERE: MESSAGE".
[[noreturn]] void refuse(const std::string& where, const std::string& message);
[[noreturn]] void refuse_type(const std::string& where, const std::string& expected, const toml::node& node);
[[noreturn]] void refuse_key(const std::string& where, const std::string& name, const std::string& of,
                             const std::vector<std::string>& names);
// Returns a string that must be one of `choices`; null stands for a missing value. `what` begins the message.
std::string read_choice(const toml::node* node, const std::vector<std::string>& choices, const std::string& where,
                        const std::string& what);

// Parse data.train, data.context, data.accumulate and optimizer.groups. `where`: "file:line: key", for messages. Raise
// Error(kUsage) for invalid values.
Sources read_sources(const toml::node& node, const std::string& where);
ContextSchedule read_contexts(const toml::node& node, const std::string& where);
AccumulateSchedule read_accumulate(const toml::node& node, const std::string& where);
ParameterGroups read_groups(const toml::node& node, const std::string& where);

}  // namespace annulus::config_keys
