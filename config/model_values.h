// The values of [model] that are more than a number or a text: read from TOML for reading.cc. Internal to config/.
#pragma once

#include <toml++/toml.h>

#include <string>

#include "model/description/rotary_spec.h"

namespace annulus::config_keys {

// Of model.rope_scaling: { kind = "yarn", factor = 4.0, original_context = 8192 }. `where`: "file:line: key". Raises
// Error(kUsage) for names, types and numbers that it cannot be.
RotaryScaling read_rotary_scaling(const toml::node& node, const std::string& where);

}  // namespace annulus::config_keys
