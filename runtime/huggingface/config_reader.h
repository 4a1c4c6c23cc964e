// ConfigReader: reads the values of a config.json, with errors that name file and key. Used by model_config.cc,
// rope_config.cc and text_ids.cc. Internal to runtime/huggingface/.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace annulus::huggingface {

// The members of a JSON object, which must outlive this. A null value counts as missing.
class ConfigReader {
 public:
  // `prefix` precedes keys in messages: "rope_parameters.".
  ConfigReader(std::string path, const nlohmann::json& object, std::string prefix = "")
      : path_(std::move(path)), object_(object), prefix_(std::move(prefix)) {}

  const std::string& path() const { return path_; }
  const nlohmann::json* find(std::string_view key) const;  // null if missing or null
  bool has(std::string_view key) const;                    // true for null as well

  // Return the value, or `otherwise` if it is missing. Raise Error(kInput) for another type, a value out of range, or
  // if both are missing.
  int64_t whole(std::string_view key, int64_t low, int64_t high, std::optional<int64_t> otherwise = {}) const;
  double number(std::string_view key, double low, double high, std::optional<double> otherwise = {}) const;
  bool flag(std::string_view key, bool otherwise) const;
  std::string text(std::string_view key, const std::string& otherwise) const;

  // Raises Error(kInput): "PATH: "key": message".
  [[noreturn]] void refuse(std::string_view key, const std::string& message) const;

 private:
  std::string path_;
  const nlohmann::json& object_;
  std::string prefix_;
};

// Parses a JSON object that may come from anywhere. Raises Error(kInput), which names `path`, for anything else.
nlohmann::json parse_object(const std::string& text, const std::string& path);

// Formats a value for a message, truncated if it is long.
std::string shown(const nlohmann::json& value);

}  // namespace annulus::huggingface
