// Finds the known name that a mistyped name was probably meant to be, for "did you mean" in error messages. Used by
// names.h and by every room that reads names or keys from files. Thread safe.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace annulus {

// The known name with the smallest edit distance to `got` (insertions, deletions, replacements and swaps of adjacent
// letters; case is ignored), the first if several have it. Empty if no name is near: at most a third of the letters of
// the longer name may change, or one letter if it has fewer than three. "zigzga" gives "zigzag".
std::string nearest(std::string_view got, const std::vector<std::string>& known);

// The end of an error message that names it: `; did you mean "zigzag"?`. Empty if no name is near.
std::string did_you_mean(std::string_view got, const std::vector<std::string>& known);

}  // namespace annulus
