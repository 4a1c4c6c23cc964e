// config.json of Hugging Face's folders as a model's description, and back: Llama, Mistral, Qwen 2 and Qwen 3, with the
// defaults of transformers. A family is a mapping (families.h), each key a line of one table (config_keys.h). Used by
// whoever reads or writes such a folder. No LibTorch. Thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "config/config.h"

namespace annulus {

// A config.json, read.
struct FolderConfig {
  ModelSection model;   // without `from`; rope_fp32, since transformers' angles are
  std::string family;   // "llama", "mistral", "qwen2", "qwen3"
  int64_t context = 0;  // max_position_embeddings
  std::string dtype;    // of its weights, as it says: "bfloat16", "float16", ...; empty: it says none
  std::string text;     // the file's
  std::string path;     // its own
};

// Of FOLDER/config.json. Raises Error(kInput) that names file and key: missing, malformed, too large, a value that is
// not computed here, a key that is not known; Error(kResource) where it cannot be read.
FolderConfig read_folder_config(const std::string& folder);
ModelSection read_model_config(const std::string& folder);
// For load_config: the model in the folder that model.from names.
ModelSection read_model_from(const Config& given);

// The same of a text; `path` stands for the file in messages.
FolderConfig parse_folder_config(const std::string& text, const std::string& path);

struct ConfigToWrite {
  ModelSection model;
  int64_t context = 0;   // max_position_embeddings
  std::string original;  // the config.json that the model began as; empty: it began here
  std::string dtype;     // of the weights beside it: "bf16", "fp32"
  // The ids with which documents begin and end, of a model that began here.
  std::optional<int64_t> begin = {}, end = {};
  bool leave_pattern = false;  // whatever the model's patterns are, those of the original are written, or causal ones
};

// The config.json of a model: the original with the keys of the model set, or of the simplest family that can say it.
// What is written reads as the same model. Raises Error(kUsage) where the family cannot say it, naming
// --leave-pattern where it is the patterns.
std::string write_model_config(const ConfigToWrite& config);

// Markdown table of every key of config.json. docs/models.md shows it.
std::string model_config_reference();

}  // namespace annulus
