// Looks up the names that a user can choose from ("zigzag", "ring", "cpu"), with the same error message everywhere.
// Used by the command line, by benchmarks and where values of a configuration are read. Thread safe: functions without
// state.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace annulus {

// The end of an error message about an unknown name: `; did you mean "x"? (known: a, b, c)`. Without a similar name it
// is only the part in parentheses.
std::string suggestion(std::string_view got, const std::vector<std::string>& known);

// The index of `got` in `known`. Raises Error(kUsage) with the nearest name if it is not there. `what` is the kind of
// name ("layout") and the room of the error, `where` the option or key that has the name.
size_t index_of_name(std::string_view got, const std::vector<std::string>& known, std::string_view what,
                     std::string_view where);

}  // namespace annulus
