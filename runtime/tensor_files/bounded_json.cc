// See bounded_json.h.
#include "runtime/tensor_files/bounded_json.h"

#include <nlohmann/json.hpp>
#include <string>
#include <unordered_set>
#include <vector>

namespace annulus {
namespace {

using Json = nlohmann::json;

// Checks the text without building a value. The parser's callback could do the same, but nlohmann would then visit all
// members of an object after each of them to remove what the callback discarded, which takes quadratic time.
class Watch : public Json::json_sax_t {
 public:
  explicit Watch(size_t deepest) : deepest_(deepest) {}
  const std::string& complaint() const { return complaint_; }

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override { return enter(); }
  bool start_array(size_t) override { return enter(); }
  bool end_object() override { return leave(); }
  bool end_array() override { return leave(); }
  bool key(string_t& name) override {
    return names_.back().insert(name).second || refuse(shown_name(name) + " appears twice");
  }
  bool parse_error(size_t, const std::string&, const Json::exception& error) override { return refuse(error.what()); }

 private:
  bool refuse(const std::string& complaint) {
    complaint_ = complaint;
    return false;
  }
  bool enter() {
    if (names_.size() >= deepest_) return refuse("nested too deeply");
    // A new set each time, because clearing a set takes as long as its largest content did.
    names_.emplace_back();
    return true;
  }
  bool leave() {
    names_.pop_back();
    return true;
  }

  size_t deepest_;
  std::vector<std::unordered_set<std::string>> names_;  // the names in each object or list that is open
  std::string complaint_;
};

}  // namespace

nlohmann::json parse_bounded_json(std::string_view text, size_t deepest) {
  {
    Watch watch(deepest);
    if (!Json::sax_parse(text, &watch)) throw JsonRefused(watch.complaint());
  }
  return Json::parse(text);
}

std::string shown_name(std::string_view name) {
  std::string text;
  for (const char c : name.substr(0, 80)) text += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
  return "\"" + text + (name.size() > 80 ? "...\"" : "\"");
}

}  // namespace annulus
