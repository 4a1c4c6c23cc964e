// See names.h.
#include "common/names.h"

#include <algorithm>

#include "common/error.h"
#include "common/nearest.h"

namespace annulus {

std::string suggestion(std::string_view got, const std::vector<std::string>& known) {
  const std::string near = nearest(got, known);
  std::string text = near.empty() ? " (known: " : "; did you mean \"" + near + "\"? (known: ";
  for (size_t i = 0; i < known.size(); ++i) text += (i ? ", " : "") + known[i];
  return text + ")";
}

size_t index_of_name(std::string_view got, const std::vector<std::string>& known, std::string_view what,
                     std::string_view where) {
  const auto it = std::find(known.begin(), known.end(), got);
  if (it != known.end()) return static_cast<size_t>(it - known.begin());
  throw Error(
      ErrorKind::kUsage, what,
      std::string(where) + ": unknown " + std::string(what) + " \"" + std::string(got) + "\"" + suggestion(got, known));
}

}  // namespace annulus
