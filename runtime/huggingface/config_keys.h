// Every key of config.json in the families that are read, and how it is handled. It is one table: a key that it does
// not hold is refused, and docs/models.md shows it. Used by model_config.cc and rope_config.cc. Internal to
// runtime/huggingface/.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace annulus::huggingface {

enum class KeyUse {
  kMapped,   // becomes part of the model's description
  kChecked,  // may only have one of `values`: others would change what the model computes
  kPassed,   // does not change what the model computes; export writes it as it was
  kRefused,  // belongs to models that are not supported; null counts as missing
};

struct ConfigKey {
  std::string name;  // a member of the rotary parameters is "rope_parameters.factor"
  KeyUse use;
  std::string_view doc;            // what it becomes, or why it is checked, passed through or refused
  std::string_view families = {};  // names separated by spaces; empty: all. Other families may only have null or false
  std::string_view values = {};    // for kChecked: JSON texts separated by spaces
};

// In the order of docs/models.md. Thread-safe.
const std::vector<ConfigKey>& config_keys();

// Null if no key has this name.
const ConfigKey* find_config_key(std::string_view name);

bool is_of_family(const ConfigKey& key, std::string_view family);

}  // namespace annulus::huggingface
