// Cuts tiles into rectangles and triangles; see rectangles.h.
#include "attention/kernels/rectangles.h"

#include <algorithm>
#include <numeric>

namespace annulus {
namespace {

int64_t shifted(int64_t bound, int64_t by) {
  return bound <= -Band::kUnbounded || bound >= Band::kUnbounded ? bound : bound + by;
}

Span part(const Span& rows, int64_t first, int64_t count) { return rows.empty() ? rows : rows.sub(first, count); }

// The part of a rectangle with these queries and keys, given as ranges of indices; the part's indices begin at 0.
Rectangle cut(const Rectangle& r, const Span& queries, const Span& keys) {
  Rectangle out = r;
  const auto first = [&](const Span& rows, const Span& indices) {
    return r.reversed ? rows.count - indices.begin - indices.count : indices.begin;
  };
  const int64_t i = first(r.query_rows, queries), j = first(r.key_rows, keys);
  out.query_rows = r.query_rows.sub(i, queries.count);
  out.key_rows = r.key_rows.sub(j, keys.count);
  out.grad_rows = part(r.grad_rows, j, keys.count);
  out.band = {shifted(r.band.lo, queries.begin - keys.begin), shifted(r.band.hi, queries.begin - keys.begin)};
  return out;
}

// The rectangle without rows and keys that are in no counted pair, with the sides of the band unbounded that cut
// nothing. Returns nothing if no pair is left.
std::optional<Rectangle> trimmed(const Rectangle& r) {
  const int64_t n = r.query_rows.count, m = r.key_rows.count;
  if (n <= 0 || m <= 0 || r.band.empty()) return std::nullopt;
  const int64_t lo = std::max(r.band.lo, -n), hi = std::min(r.band.hi, m);  // wider bounds cut no more
  const Span queries = Span::range(std::max<int64_t>(0, -hi), std::min(n, m - lo));
  const Span keys = Span::range(std::max<int64_t>(0, lo), std::min(m, n + hi));
  if (queries.empty() || keys.empty()) return std::nullopt;
  Rectangle out = cut(r, queries, keys);
  if (out.band.lo <= 1 - queries.count) out.band.lo = -Band::kUnbounded;
  if (out.band.hi >= keys.count - 1) out.band.hi = Band::kUnbounded;
  return out;
}

// Calls take() for ranges of rows of the rectangle, such that a part with a band has no more rows than keys. For this,
// rows that the band does not cut become parts of their own. Operators differ in where they align a band if there are
// more rows than keys, and some ignore a band that is wider than they expect.
template <typename Take>
void take_rows(const Rectangle& r, const Take& take) {
  const int64_t n = r.query_rows.count, m = r.key_rows.count;
  if (r.whole() || n <= m) return take(r);
  // The band does not cut rows before `lower` from below, nor rows from `upper` on from above.
  const int64_t lower = r.band.unbounded_below() ? n : std::clamp<int64_t>(1 - r.band.lo, 0, n);
  const int64_t upper = r.band.unbounded_above() ? 0 : std::clamp<int64_t>(m - 1 - r.band.hi, 0, n);
  const int64_t first = std::min(lower, upper), second = std::max(lower, upper);
  for (const Span& rows : {Span::range(0, first), Span::range(first, second), Span::range(second, n)}) {
    if (rows.empty()) continue;
    if (const std::optional<Rectangle> part = trimmed(cut(r, rows, Span::range(0, m)))) take(*part);
  }
}

// The same pairs with rows and keys numbered from the other end.
Rectangle turned(const Rectangle& r) {
  Rectangle out = r;
  out.reversed = !r.reversed;
  const int64_t more = r.key_rows.count - r.query_rows.count;
  out.band = {r.band.unbounded_above() ? -Band::kUnbounded : more - r.band.hi,
              r.band.unbounded_below() ? Band::kUnbounded : more - r.band.lo};
  return out;
}

void add_triangles(const Rectangle& untrimmed, std::vector<Rectangle>& out) {
  const std::optional<Rectangle> r = trimmed(untrimmed);
  if (!r) return;
  const int64_t n = r->query_rows.count, m = r->key_rows.count;
  if (r->whole() || r->lower_triangle()) {
    take_rows(*r, [&](const Rectangle& part) {
      out.push_back(part);
      // Without a band the order of rows does not matter. A common order lets rectangles of one shape share a call.
      if (part.whole()) out.back().reversed = false;
    });
  } else if (r->band.unbounded_below()) {  // all rows see the keys before the last one that row 0 sees
    add_triangles(cut(*r, Span::range(0, n), Span::range(0, r->band.hi)), out);
    add_triangles(cut(*r, Span::range(0, n), Span::range(r->band.hi, m)), out);
  } else if (r->band.unbounded_above()) {
    add_triangles(turned(*r), out);
  } else {
    // If there are at most as many rows as the band is wide, its two edges have no key in common.
    const int64_t width = r->band.hi - r->band.lo + 1;
    for (int64_t i = 0; i < n; i += width) {
      const int64_t last = std::min(n, i + width) - 1;
      const Span rows = Span::range(i, last + 1);
      const auto keys = [&](int64_t begin, int64_t end) {
        return Span::range(std::clamp<int64_t>(begin, 0, m), std::clamp<int64_t>(end, 0, m));
      };
      for (const Span& part : {keys(i + r->band.lo, last + r->band.lo), keys(last + r->band.lo, i + r->band.hi + 1),
                               keys(i + r->band.hi + 1, last + r->band.hi + 1)}) {
        if (!part.empty()) add_triangles(cut(*r, rows, part), out);
      }
    }
  }
}

}  // namespace

std::optional<std::vector<Rectangle>> rectangles_of(const Tile& tile, int64_t most) {
  std::vector<Rectangle> out;
  const Span &q = tile.query_positions, &k = tile.key_positions;
  if (q.empty() || k.empty()) return out;
  const auto add = [&](const Rectangle& r) {
    const std::optional<Rectangle> kept = trimmed(r);
    if (kept) take_rows(*kept, [&](const Rectangle& part) { out.push_back(part); });
  };
  if (tile.band.unbounded_below() && tile.band.unbounded_above()) {
    add({tile.query_rows, tile.key_rows, tile.grad_rows, tile.band});
    return out;
  }
  const int64_t q_stride = q.count > 1 ? q.stride : k.stride, k_stride = k.count > 1 ? k.stride : q.stride;
  const int64_t step = std::lcm(q_stride, k_stride);
  const int64_t q_classes = std::min(q.count, step / q_stride), k_classes = std::min(k.count, step / k_stride);
  if (q_classes * k_classes > most) return std::nullopt;
  const auto members = [](const Span& s, int64_t first, int64_t classes) {
    return s.empty() ? s : Span{s.at(first), s.stride * classes, (s.count - first + classes - 1) / classes};
  };
  for (int64_t a = 0; a < q_classes; ++a) {
    for (int64_t b = 0; b < k_classes; ++b) {
      const int64_t apart = k.at(b) - q.at(a);
      const auto over_indices = [&](int64_t bound, bool up) {
        if (bound <= -Band::kUnbounded || bound >= Band::kUnbounded) return bound;
        return up ? ceil_div(bound - apart, step) : floor_div(bound - apart, step);
      };
      add({members(tile.query_rows, a, q_classes),
           members(tile.key_rows, b, k_classes),
           members(tile.grad_rows, b, k_classes),
           {over_indices(tile.band.lo, true), over_indices(tile.band.hi, false)}});
    }
  }
  return out;
}

std::vector<Rectangle> triangles_of(const Rectangle& rectangle) {
  std::vector<Rectangle> out;
  add_triangles(rectangle, out);
  return out;
}

}  // namespace annulus
