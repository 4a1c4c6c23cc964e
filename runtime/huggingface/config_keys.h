// The table of all keys of config.json in the supported families, and their handling. Keys outside it are rejected.
// docs/reference/models.md shows it. Used by model_config.cc and rope_config.cc. Internal to runtime/huggingface/.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace annulus::huggingface {

enum class KeyUse {
  kMapped,   // part of the model's description
  kChecked,  // must have one of `values`: others would change the model's results
  kPassed,   // does not affect the model's results; export writes it unchanged
  kRefused,  // of unsupported models; null counts as missing
};

struct ConfigKey {
  std::string name;  // a member of the rotary parameters is "rope_parameters.factor"
  KeyUse use;
  std::string_view doc;            // its meaning, or why it is checked, passed through or rejected
  std::string_view families = {};  // separated by spaces; empty: all. In other families only null or false is accepted
  std::string_view values = {};    // for kChecked: JSON values separated by spaces
};

// Returns the table, in the order of docs/reference/models.md. Thread safe.
const std::vector<ConfigKey>& config_keys();

// Returns null if no key has this name.
const ConfigKey* find_config_key(std::string_view name);

bool is_of_family(const ConfigKey& key, std::string_view family);

}  // namespace annulus::huggingface
