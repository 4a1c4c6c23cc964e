// Parses untrusted JSON: headers of safetensors files, manifests of checkpoints, and the configurations in Hugging Face
// folders. Rejects duplicate names, which parsers silently accept, and deep nesting. The time is linear in the length
// of the text.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <stdexcept>
#include <string_view>

namespace annulus {

// The reason why a text is rejected, without the file's name: "nested too deeply".
class JsonRefused : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Raises JsonRefused if the text is not JSON, if objects and lists are nested more than `deepest` deep, or if an object
// has a duplicate name. Thread safe.
nlohmann::json parse_bounded_json(std::string_view text, size_t deepest);

// Formats a name from a file for a message: quoted, truncated to 80 characters, and printable.
std::string shown_name(std::string_view name);

}  // namespace annulus
