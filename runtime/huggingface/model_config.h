// Converts between config.json of a folder in Hugging Face's layout and a ModelSection: Llama, Mistral, SmolLM3, Qwen
// 2, Qwen 3 and Gemma 3 (text), with the defaults of transformers. families.h has the families, config_keys.h the keys.
// Used by the subcommands that take such a folder and by export. Needs no LibTorch. Thread safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "runtime/config/config.h"

namespace annulus {

// The contents of a config.json.
struct FolderConfig {
  ModelSection model;   // without `from`; rope_fp32 is true, as in transformers
  std::string family;   // "llama", "mistral", "smollm3", "qwen2", "qwen3", "gemma3_text"
  int64_t context = 0;  // max_position_embeddings
  std::string dtype;    // of its weights, as in the file: "bfloat16", "float16", ...; empty: absent
  std::string text;     // the whole file
  std::string path;     // the file's path
};

// Reads FOLDER/config.json. Raises Error(kInput), naming file and key, if it is missing, malformed or too large, or has
// an unsupported value or an unknown key; Error(kResource) if it cannot be read.
FolderConfig read_folder_config(const std::string& folder);
ModelSection read_model_config(const std::string& folder);
// Reads the folder model.from; the ModelReader of load_config.
ModelSection read_model_from(const Config& given);

// Parses the text of a config.json; `path` names the file in messages.
FolderConfig parse_folder_config(const std::string& text, const std::string& path);

struct ConfigToWrite {
  ModelSection model;
  int64_t context = 0;   // max_position_embeddings
  std::string original;  // the config.json that the model was imported with; empty: it was trained from scratch
  std::string dtype;     // of the exported weights: "bf16", "fp32", "fp64"
  // bos_token_id and eos_token_id, for a model trained from scratch.
  std::optional<int64_t> begin = {}, end = {};
  bool leave_pattern = false;  // write the original's patterns, or causal ones, instead of the model's
};

// Returns the config.json of a model: the original with the model's keys set, or that of the simplest family that can
// express the model. It reads back as the same model. Raises Error(kUsage) if the family cannot express the model, and
// suggests --leave-pattern if only the patterns are the reason.
std::string write_model_config(const ConfigToWrite& config);

// Returns a Markdown table of every key of config.json, for docs/reference/models.md.
std::string model_config_reference();

}  // namespace annulus
