// See form_stream.h.
#include "attention/proof/form_stream.h"

#include <istream>
#include <utility>
#include <vector>

#include "attention/proof/form_value.h"
#include "common/checked_json.h"

namespace annulus {
namespace {

using Json = nlohmann::json;

constexpr size_t kDeepestForm = 16;
// What nlohmann's values take, with their share of what holds them, at least in the case that takes most.
constexpr double kNumberBytes = 32, kContainerBytes = 96, kNameBytes = 112;
constexpr double kBytesBetweenChecks = 1 << 20;

class FormStream : public Json::json_sax_t {
 public:
  FormStream(const std::string& source, const FormPieces& pieces) : source_(source), pieces_(pieces) {}
  Json take() { return std::move(root_); }

  bool null() override { return value(nullptr); }
  bool boolean(bool given) override { return value(given); }
  bool number_integer(number_integer_t given) override { return value(given); }
  bool number_unsigned(number_unsigned_t given) override { return value(given); }
  bool number_float(number_float_t given, const string_t&) override { return value(given); }
  bool string(string_t& given) override {
    charge(static_cast<double>(given.size()));
    return value(std::move(given));
  }
  bool binary(binary_t&) override { return value(nullptr); }
  bool start_object(size_t) override { return open(Json::object()); }
  bool start_array(size_t) override {
    const bool programs = open_.size() == 1 && open_[0].value.is_object() && open_[0].name == "programs";
    if (programs) pieces_.begin(open_[0].value);
    open(Json::array());
    in_programs_ = in_programs_ || programs;
    if (programs) before_programs_ = bytes_;
    return true;
  }
  bool end_object() override { return close(); }
  bool end_array() override {
    if (open_.size() == 2) in_programs_ = false;
    return close();
  }
  bool key(string_t& name) override {
    charge(kNameBytes + static_cast<double>(name.size()));
    Open& object = open_.back();
    object.name = std::move(name);
    if (object.value.contains(object.name)) refuse_form(source_, way() + " appears twice");
    return true;
  }
  bool parse_error(size_t at, const std::string&, const Json::exception& error) override {
    const bool syntax = dynamic_cast<const Json::parse_error*>(&error) != nullptr;
    const std::string place = open_.empty() ? "" : " (" + way() + ")";
    if (!syntax) refuse_form(source_, "a number is too large" + place);
    refuse_form(source_, "not JSON, or cut off, at byte " + std::to_string(at) + place);
  }

 private:
  // An object or list that is not complete yet.
  struct Open {
    Json value;
    std::string name;   // of the member that comes next
    size_t passed = 0;  // items that it does not hold any more
  };

  std::string way() const {
    std::string text;
    for (const Open& open : open_) {
      if (open.value.is_array()) {
        text += "[" + std::to_string(open.passed + open.value.size()) + "]";
      } else {
        const std::string quoted = shown_name(open.name);
        text += (text.empty() ? "" : ".") + quoted.substr(1, quoted.size() - 2);
      }
    }
    return text;
  }

  void charge(double bytes) {
    bytes_ += bytes;
    if (bytes_ < next_check_) return;
    pieces_.require_memory(bytes_ + kBytesBetweenChecks);
    next_check_ = bytes_ + kBytesBetweenChecks;
  }

  bool open(Json empty) {
    charge(kContainerBytes);
    if (open_.size() >= kDeepestForm) refuse_form(source_, way() + " is nested too deeply");
    open_.push_back({std::move(empty), {}, 0});
    return true;
  }

  bool close() {
    Json complete = std::move(open_.back().value);
    open_.pop_back();
    return place(std::move(complete));
  }

  template <typename Value>
  bool value(Value&& given) {
    charge(kNumberBytes);
    return place(Json(std::forward<Value>(given)));
  }

  bool place(Json complete) {
    if (open_.empty()) {
      root_ = std::move(complete);
    } else if (in_programs_ && open_.size() == 2) {
      pieces_.program(complete, open_.back().passed++);
      bytes_ = before_programs_;
      next_check_ = bytes_ + kBytesBetweenChecks;
    } else if (Open& in = open_.back(); in.value.is_array()) {
      in.value.push_back(std::move(complete));
    } else {
      in.value[in.name] = std::move(complete);
    }
    return true;
  }

  const std::string& source_;
  const FormPieces& pieces_;
  std::vector<Open> open_;  // from the outermost
  Json root_;
  bool in_programs_ = false;
  double bytes_ = 0, before_programs_ = 0, next_check_ = kBytesBetweenChecks;
};

}  // namespace

Json stream_form(std::istream& in, const std::string& source, const FormPieces& pieces) {
  FormStream stream(source, pieces);
  Json::sax_parse(in, &stream);
  return stream.take();
}

}  // namespace annulus
