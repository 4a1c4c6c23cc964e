// The values of [data] and [optimizer] that are more than a number or a text: read from TOML for reading.cc, with the
// words for nodes of TOML that both use. Internal to config/.
#pragma once

#include <toml++/toml.h>

#include <string>
#include <string_view>

#include "config/config.h"

namespace annulus::config_keys {

// What a node is, in words: "a table", "a whole number".
std::string_view type_name(const toml::node& node);
// The value as the user wrote it, for messages; long ones are cut.
std::string shown(const toml::node& node);
// Raises Error(kUsage).
[[noreturn]] void refuse(const std::string& where, const std::string& message);

// Of data.train, data.context, data.accumulate and optimizer.groups. `where`: "file:line: key". Raise Error(kUsage).
Sources read_sources(const toml::node& node, const std::string& where);
ContextSchedule read_contexts(const toml::node& node, const std::string& where);
AccumulateSchedule read_accumulate(const toml::node& node, const std::string& where);
ParameterGroups read_groups(const toml::node& node, const std::string& where);

}  // namespace annulus::config_keys
