// Reads and writes the rotary embedding of a config.json in both formats: rope_parameters, or rope_theta with
// rope_scaling. Where layers with a window rotate in a way of their own (Rotaries::kByWindow), these are
// rope_parameters.sliding_attention beside rope_parameters.full_attention, or rope_local_base_freq. Used by
// model_config.cc and write_config.cc. Internal to runtime/huggingface/.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>

#include "runtime/config/config.h"
#include "runtime/huggingface/config_reader.h"
#include "runtime/huggingface/families.h"
#include "runtime/model/model_shape.h"

namespace annulus::huggingface {

// Sets rope_theta and rope_scaling of the shape, and returns the settings of layers with a window. `context`:
// max_position_embeddings. Raises Error(kInput), which names the key.
LayerRotary read_rope(const ConfigReader& config, const Family& family, int64_t context, ModelShape& shape);

// Writes them, and no_rope_layers where the family has it, in the format that `config` has, or else in the older one,
// which every version of transformers reads.
void write_rope(const Family& family, const ModelSection& model, nlohmann::ordered_json& config);

}  // namespace annulus::huggingface
