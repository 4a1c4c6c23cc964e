// The ids with which texts of a model begin and end, as its folder says. Used by the sampler. Thread-safe.
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

// Of FOLDER/generation_config.json, or of what it does not say config.json. Raises Error(kInput) naming file and key
// where they are malformed, Error(kResource) where they cannot be read.
TextIds read_text_ids(const std::string& folder);

}  // namespace annulus
