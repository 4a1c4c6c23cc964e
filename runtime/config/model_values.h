// Parses the structured values of [model], for reading.cc. Internal to runtime/config/.
#pragma once

#include <toml++/toml.h>

#include <string>

#include "attention/modules/rotary_spec.h"

namespace annulus::config_keys {

// Parses model.rope_scaling: { kind = "yarn", factor = 4.0, original_context = 8192 }. `where`: "file:line: key", for
// messages. Raises Error(kUsage) for unknown names, wrong types and numbers out of range.
RotaryScaling read_rotary_scaling(const toml::node& node, const std::string& where);

}  // namespace annulus::config_keys
