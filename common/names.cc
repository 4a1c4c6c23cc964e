// See names.h.
#include "common/names.h"

#include <algorithm>
#include <cctype>

#include "common/error.h"
#include "common/text.h"

namespace annulus {
namespace {

// Anything longer is not a name. The limit also bounds the memory that the distance takes.
constexpr size_t kLongest = 256;

bool same(char a, char b) {
  return std::tolower(static_cast<unsigned char>(a)) == std::tolower(static_cast<unsigned char>(b));
}

// Optimal string alignment distance.
size_t distance(std::string_view a, std::string_view b) {
  std::vector<size_t> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) last[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (same(a[i - 1], b[j - 1]) ? 0 : 1)});
      if (i > 1 && j > 1 && same(a[i - 1], b[j - 2]) && same(a[i - 2], b[j - 1]))
        row[j] = std::min(row[j], before[j - 2] + 1);
    }
    before.swap(last);
    last.swap(row);
  }
  return last[b.size()];
}

}  // namespace

std::string nearest(std::string_view got, const std::vector<std::string>& known) {
  if (got.size() > kLongest) return "";
  std::string best;
  size_t best_distance = kLongest;
  for (const std::string& name : known) {
    if (name.size() > kLongest) continue;
    const size_t d = distance(got, name);
    const size_t allowed = std::max<size_t>(1, std::max(got.size(), name.size()) / 3);
    // In a name of one letter, one edit may replace everything, so it is not near.
    if (d <= allowed && d < std::max(got.size(), name.size()) && d < best_distance) {
      best = name;
      best_distance = d;
    }
  }
  return best;
}

std::string did_you_mean(std::string_view got, const std::vector<std::string>& known) {
  const std::string near = nearest(got, known);
  return near.empty() ? "" : "; did you mean \"" + near + "\"?";
}

std::string alternatives(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) {
    text += (text.empty() ? "" : &name == &names.back() ? " or " : ", ") + name;
  }
  return text;
}

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
