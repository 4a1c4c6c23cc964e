// Counts the pairs of a pattern, and so the work of an attention call, without visiting them (count_pairs in
// pattern.h), but for those of masks.
#include <algorithm>
#include <limits>

#include "attention/pattern/pattern.h"
#include "common/error.h"

namespace annulus {
namespace {

using Wide = __int128;  // 2^40 queries may see 2^40 keys each

// The sum over 0 <= i < n of floor((a i + b) / m) for a, b >= 0 and m >= 1. It counts the lattice points below a line
// and exchanges the axes in each round, as Euclid's algorithm does, so the number of rounds is logarithmic.
Wide sum_of_floors(Wide n, Wide m, Wide a, Wide b) {
  Wide sum = 0;
  while (n > 0) {
    sum += n * (n - 1) / 2 * (a / m) + n * (b / m);
    a %= m, b %= m;
    const Wide top = a * n + b;
    if (top < m) break;
    n = top / m;
    b = top % m;
    std::swap(a, m);
  }
  return sum;
}

// Pairs with key - query <= reach.
Wide pairs_up_to(const Span& queries, const Span& keys, int64_t reach) {
  // Query i sees the keys up to queries.at(i) + reach. The queries before `none` see no key, and those from `all` on
  // see all keys.
  const int64_t none =
      std::clamp<int64_t>(ceil_div(keys.begin - reach - queries.begin, queries.stride), 0, queries.count);
  const int64_t all =
      std::clamp<int64_t>(ceil_div(keys.last() - reach - queries.begin, queries.stride), none, queries.count);
  const Wide partly = sum_of_floors(all - none, keys.stride, queries.stride, queries.at(none) + reach - keys.begin);
  return partly + (all - none) + Wide{queries.count - all} * keys.count;
}

// The pairs of a slice of one batch row and head that its mask shows.
Wide shown_pairs(const Slice& s, const MaskPlane& plane) {
  Wide pairs = 0;
  for (int64_t i = 0; i < s.queries.count; ++i) {
    const int64_t query = s.queries.at(i);
    const Span keys = s.keys.clip(query + s.band.lo, query + s.band.hi);
    if (keys.empty()) continue;
    const MaskBits bits = plane.bits(query, keys.begin);
    if (bits.words == nullptr) {
      throw Error(ErrorKind::kPlan, "pattern",
                  "the pairs of a mask can be counted only where the bits of all its queries are held, but those of "
                  "query " +
                      std::to_string(query) + " are held by another rank: make the mask where there is one rank");
    }
    for_each_shown(bits, keys, [&](int64_t, int64_t count) { pairs += count; });
  }
  return pairs;
}

}  // namespace

int64_t count_pairs(const Pattern& pattern) {
  Wide total = 0;
  for (const Slice& s : pattern.slices) {
    if (s.queries.empty() || s.keys.empty() || s.batch.empty() || s.heads.empty() || s.band.empty()) continue;
    const Wide pairs = s.mask >= 0
                           ? shown_pairs(s, pattern.masks[static_cast<size_t>(s.mask)])
                           : pairs_up_to(s.queries, s.keys, s.band.hi) - pairs_up_to(s.queries, s.keys, s.band.lo - 1);
    total += pairs * s.batch.count * s.heads.count;
  }
  return static_cast<int64_t>(std::min<Wide>(total, std::numeric_limits<int64_t>::max()));
}

}  // namespace annulus
