// Parses JSON from files that other programs wrote: headers of safetensors files, manifests of checkpoints, and the
// configurations in Hugging Face folders. It refuses input that a parser would silently accept or that would cost
// disproportionate time or memory. The time is linear in the length of the text.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <stdexcept>
#include <string_view>

namespace annulus {

// Says what is wrong with the text, without the name of a file: "nested too deeply".
class JsonRefused : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Raises JsonRefused if the text is not JSON, if more than `deepest` objects and lists are nested, or if an object has
// a name twice. Thread-safe.
nlohmann::json parse_bounded_json(std::string_view text, size_t deepest);

// Returns a name from a file for use in a message: quoted, shortened to 80 characters and made printable.
std::string shown_name(std::string_view name);

}  // namespace annulus
