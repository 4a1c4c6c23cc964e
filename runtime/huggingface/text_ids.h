// Reads the beginning- and end-of-text token ids of a model's folder. Used by the sampler. Thread safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace annulus {

struct TextIds {
  std::optional<int64_t> begin;  // bos_token_id
  std::vector<int64_t> ends;     // eos_token_id: one, or several
};

// Reads FOLDER/generation_config.json, and config.json for ids missing there. Raises Error(kInput), naming file and
// key, if they are malformed, and Error(kResource) if they cannot be read.
TextIds read_text_ids(const std::string& folder);

}  // namespace annulus
