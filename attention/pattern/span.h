// Span, Band and Slice: the value types of patterns, layouts and plans. Used by attention/pattern, attention/plan and
// the packages that execute plans.
//
// Positions here are indices into the sequence: query i and key j of 0, ..., S-1. A query offset (the position of query
// 0) is added to the bands when a pattern is made (pattern.cc), so code that uses slices can ignore it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace annulus {

// Return a / b rounded towards minus or plus infinity; b > 0.
inline int64_t floor_div(int64_t a, int64_t b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }
inline int64_t ceil_div(int64_t a, int64_t b) { return a >= 0 ? (a + b - 1) / b : -(-a / b); }

// The arithmetic progression begin, begin + stride, ... with `count` members; stride >= 1. The intersection of two
// spans is a span.
struct Span {
  int64_t begin = 0;
  int64_t stride = 1;
  int64_t count = 0;

  // Returns the span [begin, end) of stride 1.
  static Span range(int64_t begin, int64_t end) { return {begin, 1, std::max<int64_t>(0, end - begin)}; }

  bool empty() const { return count <= 0; }
  int64_t last() const { return begin + (count - 1) * stride; }  // of a nonempty span
  int64_t at(int64_t i) const { return begin + i * stride; }
  bool contains(int64_t x) const { return count > 0 && x >= begin && x <= last() && (x - begin) % stride == 0; }
  // Returns the index of x, which must be a member.
  int64_t index_of(int64_t x) const { return (x - begin) / stride; }
  // Returns the members with indices first, ..., first + n - 1.
  Span sub(int64_t first, int64_t n) const { return {at(first), stride, n}; }
  // Returns the members within [lo, hi].
  Span clip(int64_t lo, int64_t hi) const;

  friend bool operator==(const Span&, const Span&) = default;
};

// Returns the intersection, exact for all strides (Chinese remainder theorem). For example 2, 6, 10, ... and 0, 6, 12,
// ... have 6, 18, 30, ... in common.
Span intersect(const Span& a, const Span& b);

// The pairs with lo <= key - query <= hi. An unbounded side is -kUnbounded or kUnbounded.
struct Band {
  static constexpr int64_t kUnbounded = int64_t{1} << 50;
  int64_t lo = -kUnbounded;
  int64_t hi = kUnbounded;

  bool unbounded_below() const { return lo <= -kUnbounded; }
  bool unbounded_above() const { return hi >= kUnbounded; }
  bool empty() const { return lo > hi; }
  bool contains(int64_t query, int64_t key) const { return lo <= key - query && key - query <= hi; }
  // Returns the intersection.
  Band meet(const Band& other) const { return {std::max(lo, other.lo), std::min(hi, other.hi)}; }

  friend bool operator==(const Band&, const Band&) = default;
};

// A set of (batch row, query head, query, key): the product of four spans, cut by a band and by a mask of tokens. A
// slice counts each of its pairs once.
struct Slice {
  Span batch;
  Span heads;  // query heads
  Span queries;
  Span keys;
  Band band;
  // The index of the plane of a mask (Pattern::masks) that says which of these pairs are counted; -1: all of them.
  int64_t mask = -1;

  friend bool operator==(const Slice&, const Slice&) = default;
};

std::string to_string(const Span& s);
std::string to_string(const Band& b);

}  // namespace annulus
