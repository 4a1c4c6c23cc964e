// Finds the known name nearest to a mistyped one, for "did you mean" in error messages. Used by names.h and by every
// module that reads names or keys from files. Thread safe.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace annulus {

// Returns the known name with the smallest edit distance to `got` (insertions, deletions, substitutions and
// transpositions of adjacent letters, ignoring case), the first in a tie. Returns "" if the distance exceeds a third of
// the length of the longer name, or 1 for names shorter than three letters. "zigzga" gives "zigzag".
std::string nearest(std::string_view got, const std::vector<std::string>& known);

// Returns the end of an error message that names it: `; did you mean "zigzag"?`. Empty if no name is near.
std::string did_you_mean(std::string_view got, const std::vector<std::string>& known);

}  // namespace annulus
