// Parses the structured values of [data] and [optimizer] (data_values.cc) and of [model] (model_values.cc), and
// describes TOML nodes for messages. `where` is "file:line: key", for messages. All raise Error(kUsage) for unknown
// names, wrong types and numbers out of range. Used by reading.cc. Internal to runtime/config/.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "attention/modules/rotary_spec.h"
#include "common/toml.h"
#include "runtime/config/config.h"
#include "runtime/model/model_shape.h"

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

// Parse data.train, data.context, data.accumulate and optimizer.groups.
Sources read_sources(const toml::node& node, const std::string& where);
ContextSchedule read_contexts(const toml::node& node, const std::string& where);
AccumulateSchedule read_accumulate(const toml::node& node, const std::string& where);
ParameterGroups read_groups(const toml::node& node, const std::string& where);

// Parses model.rope_scaling: { kind = "yarn", factor = 4.0, original_context = 8192 }.
RotaryScaling read_rotary_scaling(const toml::node& node, const std::string& where);

// Parses model.rope_layers, a list of such tables that may have a `theta`, and then need no kind; {} stands for the
// settings of the model.
LayerRotaries read_layer_rotaries(const toml::node& node, const std::string& where);

// Parses true, false or a list of them, which must not be empty.
LayerSwitch read_layer_switch(const toml::node& node, const std::string& where);

}  // namespace annulus::config_keys
