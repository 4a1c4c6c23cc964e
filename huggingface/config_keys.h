// Every key of config.json of the families that are read, and what is done with it. One table: what is in none of its
// lines is refused, and docs/models.md shows it. Internal to huggingface/.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace annulus::huggingface {

enum class KeyUse {
  kMapped,   // says something of the model
  kChecked,  // may have the values in `values` alone: others would change what the model computes
  kPassed,   // changes nothing that the model computes; export writes it as it was
  kRefused,  // belongs to models that are not computed here; null is none
};

struct ConfigKey {
  std::string_view name;  // of a member of the rotary parameters: "rope_parameters.factor"
  KeyUse use;
  std::string_view doc;            // what it becomes, or why it is refused
  std::string_view families = {};  // names with spaces between; empty: all. In others null and false alone may stand
  std::string_view values = {};    // of kChecked, JSON texts with spaces between
};

// In the order of the page. Thread-safe.
const std::vector<ConfigKey>& config_keys();

// Null where there is none of this name.
const ConfigKey* find_config_key(std::string_view name);

bool is_of_family(const ConfigKey& key, std::string_view family);

}  // namespace annulus::huggingface
