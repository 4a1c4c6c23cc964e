// See config_reader.h.
#include "runtime/huggingface/config_reader.h"

#include <cmath>

#include "common/checked_json.h"
#include "common/error.h"
#include "common/text.h"

namespace annulus::huggingface {

nlohmann::json parse_object(const std::string& text, const std::string& path) {
  constexpr size_t kDeepest = 16;
  const auto refuse = [&](const std::string& what) { throw Error(ErrorKind::kInput, "huggingface", path + what); };
  nlohmann::json object;
  try {
    object = parse_bounded_json(text, kDeepest);
  } catch (const JsonRefused& refused) {
    refuse(std::string(": expected JSON: ") + refused.what());
  }
  if (!object.is_object()) refuse(": expected a JSON object");
  return object;
}

std::string shown(const nlohmann::json& value) {
  const std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true);
  return text.size() > 80 ? text.substr(0, 80) + "..." : text;
}

const nlohmann::json* ConfigReader::find(std::string_view key) const {
  const auto found = object_.find(key);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

bool ConfigReader::has(std::string_view key) const { return object_.contains(key); }

void ConfigReader::refuse(std::string_view key, const std::string& message) const {
  throw Error(ErrorKind::kInput, "huggingface", path_ + ": " + shown_name(prefix_ + std::string(key)) + " " + message);
}

int64_t ConfigReader::whole(std::string_view key, int64_t low, int64_t high, std::optional<int64_t> otherwise) const {
  const nlohmann::json* value = find(key);
  if (value == nullptr && otherwise) return *otherwise;
  const std::string expected = "must be a whole number from " + with_commas(low) + " to " + with_commas(high);
  if (value == nullptr) refuse(key, expected + ", but is missing");
  // Numbers beyond 63 bits are held as unsigned ones.
  const bool fits = value->is_number_integer() &&
                    (!value->is_number_unsigned() || value->get<uint64_t>() <= static_cast<uint64_t>(high));
  if (!fits || value->get<int64_t>() < low || value->get<int64_t>() > high)
    refuse(key, expected + ", but is " + shown(*value));
  return value->get<int64_t>();
}

double ConfigReader::number(std::string_view key, double low, double high, std::optional<double> otherwise) const {
  const nlohmann::json* value = find(key);
  if (value == nullptr && otherwise) return *otherwise;
  const std::string expected = "must be a number from " + exact(low) + " to " + exact(high);
  if (value == nullptr) refuse(key, expected + ", but is missing");
  const double n = value->is_number() ? value->get<double>() : std::nan("");
  if (!(n >= low && n <= high)) refuse(key, expected + ", but is " + shown(*value));
  return n;
}

bool ConfigReader::flag(std::string_view key, bool otherwise) const {
  const nlohmann::json* value = find(key);
  if (value == nullptr) return otherwise;
  if (!value->is_boolean()) refuse(key, "must be true or false, but is " + shown(*value));
  return value->get<bool>();
}

std::string ConfigReader::text(std::string_view key, const std::string& otherwise) const {
  const nlohmann::json* value = find(key);
  if (value == nullptr) return otherwise;
  if (!value->is_string()) refuse(key, "must be a string, but is " + shown(*value));
  return value->get<std::string>();
}

}  // namespace annulus::huggingface
