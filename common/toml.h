// toml++, whose checks of itself are errors instead of the end of the process: text from outside can fail them
// (parse_value of version 3.3 on some text that is not TOML). All files that use toml++ include it by this header.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace annulus {

// Says why a text is not TOML, and in which line, counted from 1; 0 if the parser does not tell.
struct TomlFault : std::runtime_error {
  explicit TomlFault(const std::string& what, int64_t at = 0) : std::runtime_error(what), line(at) {}
  int64_t line;
};

// A function of its own, because some checks are in functions that GCC knows not to throw.
[[noreturn]] inline void raise_toml_fault() { throw TomlFault("this is not TOML"); }

}  // namespace annulus

#define TOML_ASSERT(expr) ((expr) ? void() : ::annulus::raise_toml_fault())
#include <toml++/toml.h>

namespace annulus {

// Parses text that may come from anywhere. `source` names it in the positions of nodes. Raises TomlFault.
inline toml::table parse_toml(std::string_view text, std::string_view source = {}) {
  try {
    return toml::parse(text, source);
  } catch (const toml::parse_error& error) {
    throw TomlFault(std::string(error.description()), error.source().begin.line);
  }
}

}  // namespace annulus
