// See checked_json.h.
#include "common/checked_json.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "common/error.h"
#include "common/text.h"

namespace annulus {
namespace {

using Json = nlohmann::json;

// Checks the text without building a value. The parser's callback could do the same, but nlohmann would then visit all
// members of an object after each of them to remove what the callback discarded, which takes quadratic time.
class Watch : public Json::json_sax_t {
 public:
  Watch(size_t bytes, size_t deepest, int64_t most) : bytes_(bytes), deepest_(deepest), most_(most) {}
  const std::string& complaint() const { return complaint_; }

  bool null() override { return count(); }
  bool boolean(bool) override { return count(); }
  bool number_integer(number_integer_t) override { return count(); }
  bool number_unsigned(number_unsigned_t) override { return count(); }
  bool number_float(number_float_t, const string_t&) override { return count(); }
  bool string(string_t&) override { return count(); }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override { return enter(); }
  bool start_array(size_t) override { return enter(); }
  bool end_object() override { return leave(); }
  bool end_array() override { return leave(); }
  bool key(string_t& name) override {
    return names_.back().insert(name).second || refuse(shown_name(name) + " appears twice");
  }
  bool parse_error(size_t at, const std::string&, const Json::exception& error) override {
    const bool syntax = dynamic_cast<const Json::parse_error*>(&error) != nullptr;
    if (!syntax) return refuse("a number in it is too large");
    return refuse("not JSON, or cut off, at byte " + std::to_string(at) + " of " + std::to_string(bytes_));
  }

 private:
  bool refuse(const std::string& complaint) {
    complaint_ = complaint;
    return false;
  }
  bool count() { return ++values_ <= most_ || refuse("more than " + with_commas(most_, "value")); }
  bool enter() {
    if (!count()) return false;
    if (names_.size() >= deepest_) return refuse("nested too deeply");
    // A new set each time, because clearing a set takes as long as its largest content did.
    names_.emplace_back();
    return true;
  }
  bool leave() {
    names_.pop_back();
    return true;
  }

  const size_t bytes_, deepest_;
  const int64_t most_;
  int64_t values_ = 0;
  std::vector<std::unordered_set<std::string>> names_;  // the names in each object or list that is open
  std::string complaint_;
};

}  // namespace

nlohmann::json parse_bounded_json(std::string_view text, size_t deepest, int64_t most) {
  Watch watch(text.size(), deepest, most);
  if (!Json::sax_parse(text, &watch)) throw JsonRefused(watch.complaint());
  return Json::parse(text);
}

std::string shown_name(std::string_view name) {
  std::string text;
  for (const char c : name.substr(0, 80)) text += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
  return "\"" + text + (name.size() > 80 ? "...\"" : "\"");
}

std::string shown_json(const nlohmann::json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return "a list of " + counted(value.size(), "value");
  std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace);
  return text.size() <= 60 ? text : text.substr(0, 58) + "..";
}

nlohmann::json parse_checked_json(std::string_view text, std::string_view module, const std::string& source) {
  try {
    return parse_bounded_json(text, 32, 4'000'000);
  } catch (const JsonRefused& refused) {
    throw Error(ErrorKind::kInput, module, source + ": " + refused.what());
  }
}

CheckedJson::CheckedJson(const nlohmann::json& value, std::string module, std::string source, std::string way)
    : value_(&value), module_(std::move(module)), source_(std::move(source)), way_(std::move(way)) {}

void CheckedJson::refuse(const std::string& expected) const {
  throw Error(
      ErrorKind::kInput, module_,
      source_ + ": " + (way_.empty() ? "the whole" : way_) + " should be " + expected + ", not " + shown_json(*value_));
}

CheckedJson CheckedJson::at(std::string_view key) const {
  if (!value_->is_object()) refuse("an object");
  const auto found = value_->find(key);
  const std::string way = (way_.empty() ? "" : way_ + ".") + std::string(key);
  if (found == value_->end()) throw Error(ErrorKind::kInput, module_, source_ + ": " + way + " is missing");
  return {*found, module_, source_, way};
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
    items.push_back({item, module_, source_, way_ + "[" + std::to_string(items.size()) + "]"});
  }
  return items;
}

std::vector<std::string> CheckedJson::texts() const {
  std::vector<std::string> texts;
  for (const CheckedJson& one : list(65536)) texts.push_back(one.text(size_t{64} << 20));
  return texts;
}

std::vector<std::string> CheckedJson::keys(size_t most) const {
  if (!value_->is_object()) refuse("an object");
  if (value_->size() > most) refuse("an object of at most " + counted(most, "member"));
  std::vector<std::string> names;
  names.reserve(value_->size());
  for (const auto& [key, item] : value_->items()) names.push_back(key);
  return names;
}

}  // namespace annulus
