// Reads and writes the rotary embedding of a config.json in both formats: rope_parameters, or rope_theta with
// rope_scaling. Used by model_config.cc and write_config.cc. Internal to runtime/huggingface/.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>

#include "runtime/huggingface/config_reader.h"
#include "runtime/model/model_shape.h"

namespace annulus::huggingface {

// Sets rope_theta and rope_scaling of the shape. `context`: max_position_embeddings. Raises Error(kInput), which names
// the key.
void read_rope(const ConfigReader& config, int64_t context, ModelShape& shape);

// Writes them in the format that `config` has, or else in the older one, which every version of transformers reads.
void write_rope(const ModelShape& shape, nlohmann::ordered_json& config);

}  // namespace annulus::huggingface
