// Parses the structured values of [model], for reading.cc. Internal to runtime/config/.
#pragma once

#include <string>

#include "attention/modules/rotary_spec.h"
#include "common/toml.h"
#include "runtime/model/model_shape.h"

namespace annulus::config_keys {

// Parses model.rope_scaling: { kind = "yarn", factor = 4.0, original_context = 8192 }. `where`: "file:line: key", for
// messages. Raises Error(kUsage) for unknown names, wrong types and numbers out of range.
RotaryScaling read_rotary_scaling(const toml::node& node, const std::string& where);

// Parses model.rope_layers, a list of such tables that may have a `theta`, and then need no kind; {} stands for the
// settings of the model.
LayerRotaries read_layer_rotaries(const toml::node& node, const std::string& where);

// Parses true, false or a list of them, which must not be empty.
LayerSwitch read_layer_switch(const toml::node& node, const std::string& where);

}  // namespace annulus::config_keys
