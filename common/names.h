// Names a user chooses among ("zigzag", "ring", "cpu"): looked up in one place, with one form of refusal.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace annulus {

// `; did you mean "x"? (known: a, b, c)`: what a refusal of an unknown name ends with.
std::string suggestion(std::string_view got, const std::vector<std::string>& known);

// The index of `got` in `known`; Error(kUsage) naming the nearest where there is none. `what` is the kind of name
// ("layout"), `where` the option or key it stood in.
size_t index_of_name(std::string_view got, const std::vector<std::string>& known, std::string_view what,
                     std::string_view where);

}  // namespace annulus
