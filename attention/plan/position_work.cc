// Counts the work of each position and what cuts between positions cost; see balance.h.
#include <algorithm>

#include "attention/plan/balance.h"

namespace annulus {
namespace {

// Numbers at the positions 0, ..., size - 1 that are sums of linear pieces. A piece costs O(1), because the second
// differences are kept: two summations give the numbers.
class LinearPieces {
 public:
  explicit LinearPieces(int64_t size) : size_(size), second_(static_cast<size_t>(size) + 2, 0) {}

  void add_at(int64_t x, int64_t weight) { add_ramp(x, 0, {x, 1, 1}, weight, weight); }

  // Adds `weight` to each member of [first, last].
  void add_constant(int64_t first, int64_t last, int64_t weight) {
    if (first <= last) add_ramp(first, 0, Span::range(first, last + 1), weight, weight);
  }

  // Adds, at each x of `domain` (stride 1), weight times the number of y in [first, last] with lo <= y - x <= hi.
  void add_counts(const Span& domain, int64_t first, int64_t last, const Band& band, int64_t weight) {
    if (domain.empty() || first > last || band.empty() || weight == 0) return;
    // The number of y <= t is the ramp of t - first + 1 less that of t - last.
    if (band.unbounded_above()) {
      add_constant(domain.begin, domain.last(), weight * (last - first + 1));
    } else {
      add_ramp_from(first - 1 - band.hi, domain, weight);
      add_ramp_from(last - band.hi, domain, -weight);
    }
    if (band.unbounded_below()) return;
    add_ramp_from(first - band.lo, domain, -weight);
    add_ramp_from(last + 1 - band.lo, domain, weight);
  }

  // Returns the numbers.
  std::vector<int64_t> sums() && {
    int64_t slope = 0, value = 0;
    for (int64_t& x : second_) {
      slope += x;
      value += slope;
      x = value;
    }
    second_.resize(static_cast<size_t>(size_));
    return std::move(second_);
  }

 private:
  // Adds weight * max(0, x - zero).
  void add_ramp_from(int64_t zero, const Span& domain, int64_t weight) {
    const int64_t first = std::max(domain.begin, zero + 1);
    if (first > domain.last()) return;
    add_ramp(first, weight, Span::range(first, domain.last() + 1), weight * (first - zero),
             weight * (domain.last() - zero));
  }
  // Adds numbers with this slope to `domain`: `at_first` at its first position, `at_last` at its last one.
  void add_ramp(int64_t first, int64_t slope, const Span& domain, int64_t at_first, int64_t at_last) {
    const int64_t end = domain.last() + 1;
    add(first, at_first);
    add(first + 1, slope - at_first);
    add(end, -at_last - slope);
    add(end + 1, at_last);
  }
  void add(int64_t x, int64_t value) {
    if (x < static_cast<int64_t>(second_.size())) second_[static_cast<size_t>(x)] += value;
  }

  int64_t size_;
  std::vector<int64_t> second_;
};

int64_t count_of(const Slice& slice, int64_t query) {
  const int64_t last = slice.keys.last();
  const int64_t lo = slice.band.unbounded_below() ? 0 : query + slice.band.lo;
  const int64_t hi = slice.band.unbounded_above() ? last : query + slice.band.hi;
  return std::max<int64_t>(0, slice.keys.clip(lo, hi).count);
}

void add_pairs(LinearPieces& pieces, const Slice& slice) {
  const int64_t weight = slice.batch.count * slice.heads.count;
  const Span &queries = slice.queries, &keys = slice.keys;
  if (queries.stride == 1 && keys.stride == 1) {
    pieces.add_counts(queries, keys.begin, keys.last(), slice.band, weight);
  } else if (queries.stride == 1 && keys.count < queries.count) {
    for (int64_t i = 0; i < keys.count; ++i) {
      const int64_t key = keys.at(i);
      const int64_t first = slice.band.unbounded_above() ? queries.begin : key - slice.band.hi;
      const int64_t last = slice.band.unbounded_below() ? queries.last() : key - slice.band.lo;
      pieces.add_constant(std::max(first, queries.begin), std::min(last, queries.last()), weight);
    }
  } else {
    for (int64_t i = 0; i < queries.count; ++i) {
      pieces.add_at(queries.at(i), weight * count_of(slice, queries.at(i)));
    }
  }
}

// Adds, for each cut x, the keys before x that the queries from x on need, and the keys from x on that those before x
// need.
void add_crossings(LinearPieces& pieces, const Slice& slice, int64_t group, int64_t length) {
  const int64_t q0 = slice.queries.begin, q1 = slice.queries.last();
  const Band& band = slice.band;
  // Only keys in reach of some query are needed.
  const int64_t first = band.unbounded_below() ? slice.keys.begin : std::max(slice.keys.begin, q0 + band.lo);
  const int64_t last = band.unbounded_above() ? slice.keys.last() : std::min(slice.keys.last(), q1 + band.hi);
  const int64_t kv_heads = (slice.heads.begin + slice.heads.count - 1) / group - slice.heads.begin / group + 1;
  const int64_t weight = std::max<int64_t>(1, slice.batch.count * kv_heads / slice.keys.stride);
  const auto domain = [length](int64_t begin, int64_t end) {
    return Span::range(std::max<int64_t>(1, begin), std::min(end, length));
  };
  pieces.add_counts(domain(0, q0), first, last, {-Band::kUnbounded, -1}, weight);
  pieces.add_counts(domain(q0, q1 + 1), first, last, {band.unbounded_below() ? -Band::kUnbounded : band.lo, -1},
                    weight);
  pieces.add_counts(domain(q0 + 1, q1 + 2), first, last, {0, band.unbounded_above() ? Band::kUnbounded : band.hi - 1},
                    weight);
  pieces.add_counts(domain(q1 + 2, length), first, last, {0, Band::kUnbounded}, weight);
}

}  // namespace

PositionWork position_work(const Pattern& pattern) {
  const AttentionShape& shape = pattern.shape;
  const int64_t length = shape.q_len, group = std::max<int64_t>(1, shape.heads / std::max<int64_t>(1, shape.kv_heads));
  LinearPieces pairs(length), crossings(length + 1);
  for (const Slice& slice : pattern.slices) {
    if (slice.queries.empty() || slice.keys.empty() || slice.batch.empty() || slice.heads.empty()) continue;
    if (slice.band.empty()) continue;
    add_pairs(pairs, slice);
    if (shape.k_len == length) add_crossings(crossings, slice, group, length);
  }
  PositionWork work{std::move(pairs).sums(), std::move(crossings).sums()};
  work.before.push_back(0);
  int64_t sum = 0;
  for (int64_t& x : work.before) {
    const int64_t own = x;
    x = sum;
    sum += own;
  }
  return work;
}

}  // namespace annulus
