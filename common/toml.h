// toml++, whose checks of itself are errors instead of the end of the process: text from outside can fail them
// (parse_value of version 3.3 on some text that is not TOML). All files that use toml++ include it by this header.
#pragma once

#include <stdexcept>

namespace annulus {

// Text that the parser can neither read nor say what is wrong with.
struct TomlFault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A function of its own, because some checks are in functions that GCC knows not to throw.
[[noreturn]] inline void raise_toml_fault() { throw TomlFault("this is not TOML"); }

}  // namespace annulus

#define TOML_ASSERT(expr) ((expr) ? void() : ::annulus::raise_toml_fault())
#include <toml++/toml.h>
