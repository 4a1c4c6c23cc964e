// JSON of files that others wrote: the headers of safetensors files, the manifests of checkpoints. What a parser would
// take without a word, or at a cost out of all proportion, is refused; the time is linear in the text.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <stdexcept>
#include <string_view>

namespace annulus {

// What is wrong with the text, in words that say no file: "nested too deeply".
class JsonRefused : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Raises JsonRefused where the text is no JSON, where more than `deepest` objects and lists lie inside one another, or
// where an object has a name twice. Thread-safe.
nlohmann::json parse_bounded_json(std::string_view text, size_t deepest);

// A name that comes from a file, for a message: quoted, cut and made printable.
std::string shown_name(std::string_view name);

}  // namespace annulus
