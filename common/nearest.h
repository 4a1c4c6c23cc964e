// The known name that a mistyped one was probably meant to be: for "did you mean" in error messages. Used by
// configuration, patterns and the command line. Thread-safe.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace annulus {

// Nearest by edit distance (insert, delete, replace, swap of neighbours; case is ignored), the first of equals. Empty
// when nothing is near: more than a third of the longer name would have to change.
std::string nearest(std::string_view got, const std::vector<std::string>& known);

}  // namespace annulus
