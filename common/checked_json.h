// Parses JSON that other programs or hosts wrote: headers of safetensors files, manifests of checkpoints, the
// configurations in Hugging Face folders, descriptions and reports of hosts. It refuses input that a parser would
// silently accept or that would cost disproportionate time or memory, and reads members with errors that name the file,
// the path to the member and what was expected. The time is linear in the length of the text.
//
// Thread safety: functions without state. A CheckedJson refers to a JSON value, which must outlive it.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace annulus {

// Says what is wrong with the text, without the name of a file: "nested too deeply".
class JsonRefused : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Raises JsonRefused if the text is not JSON, has a number beyond a double's or more than `most` values, if more than
// `deepest` objects and lists are nested, or if an object has a name twice.
nlohmann::json parse_bounded_json(std::string_view text, size_t deepest, int64_t most = INT64_MAX);

// Returns a name from a file for use in a message: quoted, shortened to 80 characters and made printable.
std::string shown_name(std::string_view name);

// Returns a value from a file for use in a message, such as "a list of 3 values" or "7": at most 60 characters.
std::string shown_json(const nlohmann::json& value);

// parse_bounded_json for 32 nested objects and lists and 4,000,000 values (so many take at most 1 GB). Raises
// Error(kInput) with the module `module`, which names `source`.
nlohmann::json parse_checked_json(std::string_view text, std::string_view module, const std::string& source);

// A JSON value and the path to it. Every reader raises Error(kInput) for an unexpected value: "SOURCE:
// hosts[2].gpus[0].pci should be a text, not 7".
class CheckedJson {
 public:
  CheckedJson(const nlohmann::json& value, std::string module, std::string source)
      : CheckedJson(value, std::move(module), std::move(source), "") {}

  // Returns the member `key` of an object, which must exist.
  CheckedJson at(std::string_view key) const;
  // Returns whether an object has a member `key` that is not null.
  bool has(std::string_view key) const;

  // Return a number in [least, most]; number() accepts only finite numbers.
  int64_t integer(int64_t least, int64_t most) const;
  double number(double least, double most) const;
  bool boolean() const;
  std::string text(size_t most = 4096) const;        // of at most `most` bytes
  std::vector<CheckedJson> list(size_t most) const;  // of at most `most` items
  std::vector<std::string> texts() const;            // a list of at most 65,536 texts, each of at most 64 MiB
  std::vector<std::string> keys(size_t most) const;  // of an object with at most `most` members

  // Raises the error "PATH should be EXPECTED, not VALUE".
  [[noreturn]] void refuse(const std::string& expected) const;

 private:
  CheckedJson(const nlohmann::json& value, std::string module, std::string source, std::string way);

  const nlohmann::json* value_;
  std::string module_, source_, way_;
};

}  // namespace annulus
