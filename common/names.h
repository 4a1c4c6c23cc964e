// Looks up names of options ("zigzag", "ring", "cpu"), with a uniform error message. Used by the command line, by
// benchmarks and by readers of configurations. Thread safe: functions without state.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace annulus {

// Returns the end of an error message about an unknown name: `; did you mean "x"? (known: a, b, c)`. Without a similar
// name it is only the part in parentheses.
std::string suggestion(std::string_view got, const std::vector<std::string>& known);

// Returns the index of `got` in `known`. Raises Error(kUsage), which suggests the nearest name, if it is not there.
// `what` is the kind of name ("layout") and the module of the error, `where` the option or key whose value it is.
size_t index_of_name(std::string_view got, const std::vector<std::string>& known, std::string_view what,
                     std::string_view where);

}  // namespace annulus
