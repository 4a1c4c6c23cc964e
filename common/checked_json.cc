// See checked_json.h.
#include "common/checked_json.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "common/error.h"
#include "common/text.h"

namespace annulus {
namespace {

constexpr int kDepth = 32;
constexpr int64_t kValues = 4'000'000;

// The value as text, short enough for a message.
std::string shown(const nlohmann::json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return "a list of " + counted(static_cast<int64_t>(value.size()), "value");
  std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace);
  return text.size() <= 60 ? text : text.substr(0, 58) + "..";
}

}  // namespace

nlohmann::json parse_checked_json(std::string_view text, std::string_view room, const std::string& source) {
  const auto fail = [&](const std::string& why) { throw Error(ErrorKind::kInput, room, source + ": " + why); };
  int64_t values = 0;
  const auto bounded = [&](int depth, nlohmann::json::parse_event_t, nlohmann::json&) {
    if (depth > kDepth) fail("it is nested deeper than " + std::to_string(kDepth) + " values");
    if (++values > kValues) fail("it has more than " + with_commas(kValues) + " values");
    return true;
  };
  try {
    return nlohmann::json::parse(text, bounded);
  } catch (const nlohmann::json::parse_error& error) {
    fail("it is not JSON, or is cut off, at byte " + std::to_string(error.byte) + " of " + std::to_string(text.size()));
  } catch (const nlohmann::json::exception&) {
    fail("a number in it is too large");
  }
  return {};
}

CheckedJson::CheckedJson(const nlohmann::json& value, std::string room, std::string source, std::string way)
    : value_(&value), room_(std::move(room)), source_(std::move(source)), way_(std::move(way)) {}

void CheckedJson::refuse(const std::string& expected) const {
  throw Error(
      ErrorKind::kInput, room_,
      source_ + ": " + (way_.empty() ? "the whole" : way_) + " should be " + expected + ", not " + shown(*value_));
}

CheckedJson CheckedJson::at(std::string_view key) const {
  if (!value_->is_object()) refuse("an object");
  const auto found = value_->find(key);
  const std::string way = (way_.empty() ? "" : way_ + ".") + std::string(key);
  if (found == value_->end()) throw Error(ErrorKind::kInput, room_, source_ + ": " + way + " is missing");
  return {*found, room_, source_, way};
}

bool CheckedJson::has(std::string_view key) const {
  if (!value_->is_object()) refuse("an object");
  const auto found = value_->find(key);
  return found != value_->end() && !found->is_null();
}

int64_t CheckedJson::integer(int64_t least, int64_t most) const {
  const std::string expected = "a whole number from " + std::to_string(least) + " to " + std::to_string(most);
  const bool fits = value_->is_number_integer() &&
                    (!value_->is_number_unsigned() || value_->get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX));
  if (!fits) refuse(expected);
  const auto number = value_->get<int64_t>();
  if (number < least || number > most) refuse(expected);
  return number;
}

double CheckedJson::number(double least, double most) const {
  const std::string expected = "a number from " + exact(least) + " to " + exact(most);
  if (!value_->is_number()) refuse(expected);
  const auto number = value_->get<double>();
  if (!std::isfinite(number) || number < least || number > most) refuse(expected);
  return number;
}

bool CheckedJson::boolean() const {
  if (!value_->is_boolean()) refuse("true or false");
  return value_->get<bool>();
}

std::string CheckedJson::text(size_t most) const {
  if (!value_->is_string()) refuse("a text");
  const auto& text = value_->get_ref<const std::string&>();
  if (text.size() > most) refuse("a text of at most " + counted(most, "byte"));
  return text;
}

std::vector<CheckedJson> CheckedJson::list(size_t most) const {
  if (!value_->is_array()) refuse("a list");
  if (value_->size() > most) refuse("a list of length at most " + std::to_string(most));
  std::vector<CheckedJson> items;
  items.reserve(value_->size());
  for (const nlohmann::json& item : *value_) {
    items.push_back({item, room_, source_, way_ + "[" + std::to_string(items.size()) + "]"});
  }
  return items;
}

std::vector<std::string> CheckedJson::keys(size_t most) const {
  if (!value_->is_object()) refuse("an object");
  if (value_->size() > most) refuse("an object of at most " + counted(static_cast<int64_t>(most), "member"));
  std::vector<std::string> names;
  names.reserve(value_->size());
  for (const auto& [key, item] : value_->items()) names.push_back(key);
  return names;
}

}  // namespace annulus
