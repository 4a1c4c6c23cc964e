// Looks up names of options ("zigzag", "ring", "cpu") and of keys, with uniform error messages that suggest the name
// meant. Used by the command line, by benchmarks and by every module that reads names or keys from files. Thread safe:
// functions without state.
#pragma once

#include <cstddef>
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

// Returns the member `name` of each entry of a table, in order.
template <typename Table>
std::vector<std::string> names_of(const Table& table) {
  std::vector<std::string> names;
  for (const auto& entry : table) names.emplace_back(entry.name);
  return names;
}

// Returns the names as alternatives, for help texts: "a, b or c".
std::string alternatives(const std::vector<std::string>& names);

// Returns the end of an error message about an unknown name: `; did you mean "x"? (known: a, b, c)`. Without a similar
// name it is only the part in parentheses.
std::string suggestion(std::string_view got, const std::vector<std::string>& known);

// Returns the index of `got` in `known`. Raises Error(kUsage), which suggests the nearest name, if it is not there.
// `what` is the kind of name ("layout") and the module of the error, `where` the option or key whose value it is.
size_t index_of_name(std::string_view got, const std::vector<std::string>& known, std::string_view what,
                     std::string_view where);

}  // namespace annulus
