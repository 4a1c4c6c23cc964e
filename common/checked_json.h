// JSON that is not trusted: parsed within bounds, and read member by member with errors that name the file, the way to
// the member and what was expected. Used where a file or another host says what something is (topology/cluster.cc,
// launcher/hosts/).
//
// Thread safety: functions without state; a CheckedJson refers to a value that must outlive it.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace annulus {

// Error(kInput), from `room` and naming `source`, where the text is no JSON, is nested deeper than 32 values, or has
// more than four million of them, which take no more than 1 GB.
nlohmann::json parse_checked_json(std::string_view text, std::string_view room, const std::string& source);

// A value and where it is. Every reader raises Error(kInput), "SOURCE: hosts[2].gpus[0].pci should be a text, not 7".
class CheckedJson {
 public:
  CheckedJson(const nlohmann::json& value, std::string room, std::string source)
      : CheckedJson(value, std::move(room), std::move(source), "") {}

  // A member that must be there, and one that may be missing or null.
  CheckedJson at(std::string_view key) const;
  bool has(std::string_view key) const;

  int64_t integer(int64_t least, int64_t most) const;
  double number(double least, double most) const;  // bounds included; finite
  bool boolean() const;
  std::string text(size_t most = 4096) const;  // its length in bytes
  std::vector<CheckedJson> list(size_t most) const;
  std::vector<std::string> keys(size_t most) const;  // of an object

  [[noreturn]] void refuse(const std::string& expected) const;

 private:
  CheckedJson(const nlohmann::json& value, std::string room, std::string source, std::string way);

  const nlohmann::json* value_;
  std::string room_, source_, way_;
};

}  // namespace annulus
