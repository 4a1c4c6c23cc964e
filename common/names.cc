// See names.h.
#include "common/names.h"

#include <algorithm>

#include "common/error.h"
#include "common/nearest.h"
#include "common/text.h"

namespace annulus {

std::string suggestion(std::string_view got, const std::vector<std::string>& known) {
  return did_you_mean(got, known) + " (known: " + join(known, ", ") + ")";
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
