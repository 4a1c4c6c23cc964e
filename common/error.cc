// See error.h.
#include "common/error.h"

#include <algorithm>
#include <charconv>

namespace annulus {
namespace {

// Removes a number and the space after it from the beginning of `text`, and returns the number.
std::optional<size_t> take_number(std::string_view& text) {
  size_t number = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (code != std::errc() || end == text.data() + text.size() || *end != ' ') return std::nullopt;
  text.remove_prefix(static_cast<size_t>(end - text.data()) + 1);
  return number;
}

}  // namespace

Error::Error(ErrorKind kind, std::string_view module, std::string_view message)
    : std::runtime_error("[" + std::string(module) + "] " + std::string(message)),
      kind_(kind),
      module_size_(module.size()) {}

// what() ends at the first zero byte. A module or message of unknown origin may contain one, so no offset is trusted.
std::string_view Error::module() const {
  const std::string_view all = what();
  return all.substr(1, module_size_);
}

std::string_view Error::message() const {
  const std::string_view all = what();
  return all.substr(std::min(all.size(), module_size_ + 3));
}

std::string Error::wire() const {
  std::string text = std::to_string(exit_code()) + " " + std::to_string(module().size()) + " ";
  text += module();
  text += " ";
  text += message();
  return text;
}

std::optional<Error> Error::from_wire(std::string_view text) {
  if (text.find('\0') != std::string_view::npos) return std::nullopt;
  const std::optional<size_t> kind = take_number(text);
  if (!kind || *kind < 1 || *kind > static_cast<size_t>(ErrorKind::kRegression)) return std::nullopt;
  const std::optional<size_t> module = take_number(text);
  if (!module || *module >= text.size() || text[*module] != ' ') return std::nullopt;
  return Error(static_cast<ErrorKind>(*kind), text.substr(0, *module), text.substr(*module + 1));
}

}  // namespace annulus
