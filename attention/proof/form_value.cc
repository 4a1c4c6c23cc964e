// See form_value.h.
#include "attention/proof/form_value.h"

#include <algorithm>

#include "common/checked_json.h"
#include "common/error.h"
#include "common/names.h"
#include "common/text.h"

namespace annulus {

void refuse_form(const std::string& source, const std::string& message) {
  throw Error(ErrorKind::kInput, "plan", source + ": " + message);
}

std::string FormValue::way() const {
  if (whole_ == nullptr) return std::string(key_);
  const std::string before = whole_->way();
  if (key_.empty()) return before + "[" + std::to_string(index_) + "]";
  return (before.empty() ? "" : before + ".") + std::string(key_);
}

void FormValue::refuse(const std::string& expected) const {
  complain("should be " + expected + ", not " + shown_json(value_));
}

void FormValue::complain(const std::string& what) const {
  const std::string place = way();
  refuse_form(source_, (place.empty() ? "the whole" : place) + " " + what);
}

void FormValue::require_keys(std::span<const std::string_view> known) const {
  if (!value_.is_object()) refuse("an object");
  for (const auto& [key, value] : value_.items()) {
    if (std::find(known.begin(), known.end(), key) != known.end()) continue;
    const std::string name = shown_name(key);
    complain("has an unknown key " + name + suggestion(key, {known.begin(), known.end()}));
  }
}

std::string FormValue::text() const {
  if (!value_.is_string()) refuse("a text");
  return value_.get<std::string>();
}

int64_t FormValue::integer(int64_t least, int64_t most) const {
  const bool fits = value_.is_number_integer() &&
                    (!value_.is_number_unsigned() || value_.get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX));
  const int64_t number = fits ? value_.get<int64_t>() : 0;
  if (fits && number >= least && number <= most) return number;
  if (most < least) complain("names something of which there is none");
  refuse("a whole number from " + std::to_string(least) + " to " + std::to_string(most));
}

int64_t FormValue::integer(const char* key, int64_t least, int64_t most) const {
  int64_t number = 0;
  member(key, [&](const FormValue& value) { number = value.integer(least, most); });
  return number;
}

int64_t FormValue::optional_integer(const char* key, int64_t least, int64_t most, int64_t otherwise) const {
  optional(key, [&](const FormValue& value) { otherwise = value.integer(least, most); });
  return otherwise;
}

Span FormValue::span(int64_t length) const {
  static const std::string what = "[begin, stride, count], three whole numbers";
  if (!value_.is_array() || value_.size() != 3) refuse(what);
  int64_t numbers[3] = {};
  each([&](const FormValue& item) {
    const size_t i = item.index_;
    numbers[i] = item.integer(i == 0 ? 0 : 1, int64_t{1} << 40);
  });
  const auto [begin, stride, count] = numbers;
  const __int128 last = begin + __int128{count - 1} * stride;
  if (last >= length) {
    complain("should be [begin, stride, count] within 0 to " + std::to_string(length) + ", the last not included; [" +
             std::to_string(begin) + ", " + std::to_string(stride) + ", " + std::to_string(count) + "] is not");
  }
  // The stride of a single member means nothing.
  return {begin, count == 1 ? 1 : stride, count};
}

std::vector<Span> FormValue::spans(int64_t length) const {
  std::vector<Span> all;
  each([&](const FormValue& item) { all.push_back(item.span(length)); });
  return all;
}

}  // namespace annulus
