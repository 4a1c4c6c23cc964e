// A value in the JSON form of a plan, with the way to it: readers that refuse whatever is not as expected, with a
// message that names the file and the way ("plan.json: programs[3].forward[2].tiles[0].buffer should be ..."). Used by
// plan_form_reader.cc alone. Unlike CheckedJson (common/checked_json.h), which makes the way's text at each step, it
// costs nothing where all is well: plans have millions of values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "attention/pattern/span.h"

namespace annulus {

// Raises Error(kInput): "SOURCE: MESSAGE".
[[noreturn]] void refuse_form(const std::string& source, const std::string& message);

// A value refers to the one that contains it, which must outlive it. Not thread safe.
class FormValue {
 public:
  // The whole of something that stands at `way`, which must outlive it as must `source`.
  FormValue(const nlohmann::json& value, const std::string& source, std::string_view way)
      : value_(value), source_(source), key_(way) {}

  // Refuses an object with other keys than these, and what is no object.
  void require_keys(std::span<const std::string_view> known) const;
  void require_keys(std::initializer_list<std::string_view> known) const {
    require_keys(std::span(known.begin(), known.size()));
  }
  bool has(const char* key) const { return value_.is_object() && value_.contains(key); }
  // Calls read(value) with the member of this name, which must be there, or if it is there.
  template <typename Read>
  void member(const char* key, const Read& read) const {
    if (!has(key)) refuse_form(source_, way() + (way().empty() ? "" : ".") + key + " is missing");
    optional(key, read);
  }
  template <typename Read>
  void optional(const char* key, const Read& read) const {
    if (!value_.is_object()) refuse("an object");
    const auto found = value_.find(key);
    if (found != value_.end()) read(FormValue(*found, *this, key, 0));
  }
  // Calls read(value) with each value of a list, in order.
  template <typename Read>
  void each(const Read& read) const {
    if (!value_.is_array()) refuse("a list");
    size_t index = 0;
    for (const nlohmann::json& item : value_) read(FormValue(item, *this, {}, index++));
  }

  bool is_text() const { return value_.is_string(); }
  std::string text() const;
  int64_t integer(int64_t least, int64_t most) const;
  // The members of an object by their names, as integer() reads them. optional_integer returns `otherwise` if there is
  // no such member.
  int64_t integer(const char* key, int64_t least, int64_t most) const;
  int64_t optional_integer(const char* key, int64_t least, int64_t most, int64_t otherwise) const;
  // [begin, stride, count] with at least one member, all within [0, length).
  Span span(int64_t length) const;
  std::vector<Span> spans(int64_t length) const;

  std::string way() const;
  const std::string& source() const { return source_; }
  // Refuses the value: "WAY should be EXPECTED, not VALUE", or "WAY WHAT".
  [[noreturn]] void refuse(const std::string& expected) const;
  [[noreturn]] void complain(const std::string& what) const;

 private:
  FormValue(const nlohmann::json& value, const FormValue& whole, std::string_view key, size_t index)
      : value_(value), source_(whole.source_), whole_(&whole), key_(key), index_(index) {}

  const nlohmann::json& value_;
  const std::string& source_;
  const FormValue* whole_ = nullptr;
  std::string_view key_;  // in the object that contains it, or empty in a list
  size_t index_ = 0;      // in the list
};

}  // namespace annulus
