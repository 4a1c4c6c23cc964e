// See nearest.h.
#include "common/nearest.h"

#include <algorithm>
#include <cctype>
#include <cstddef>

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

}  // namespace annulus
