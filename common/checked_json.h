// Parses untrusted JSON within size limits, and reads it member by member, with errors that name the file, the path to
// the member and the expected value. Used for descriptions that a file or another host provides
// (launcher/topology/cluster.cc, launcher/hosts/).
//
// Thread safety: functions without state. A CheckedJson refers to a JSON value, which must outlive it.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace annulus {

// Raises Error(kInput) if the text is not JSON, has a number outside the range of a double, is nested more than 32
// levels deep, or has more than 4,000,000 values (which take at most 1 GB). The error has the room `room` and names
// `source`.
nlohmann::json parse_checked_json(std::string_view text, std::string_view room, const std::string& source);

// A JSON value and the path to it. Every reader raises Error(kInput) for an unexpected value: "SOURCE:
// hosts[2].gpus[0].pci should be a text, not 7".
class CheckedJson {
 public:
  CheckedJson(const nlohmann::json& value, std::string room, std::string source)
      : CheckedJson(value, std::move(room), std::move(source), "") {}

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
  std::vector<std::string> keys(size_t most) const;  // of an object with at most `most` members

  // Raises the error "PATH should be EXPECTED, not VALUE".
  [[noreturn]] void refuse(const std::string& expected) const;

 private:
  CheckedJson(const nlohmann::json& value, std::string room, std::string source, std::string way);

  const nlohmann::json* value_;
  std::string room_, source_, way_;
};

}  // namespace annulus
