// Cuts tiles into rectangles that a library's attention operator takes: with one stride for queries and keys, with
// bands over row indices instead of positions, and, for operators without bands, into triangles. Works without tensors.
// Used by composition.cc. The functions are thread safe.
#pragma once

#include <optional>
#include <vector>

#include "attention/plan/plan.h"

namespace annulus {

// Query rows times key rows. The pair of query index i and key index j (indices into the rows) is counted if the band
// contains j - i. A side of the band that cuts nothing is unbounded. Every row and every key is in some counted pair.
// If `reversed`, index 0 is the last row and the last key, so a band that cuts below in row order cuts above in index
// order.
struct Rectangle {
  Span query_rows;
  Span key_rows;
  Span grad_rows;  // as many as key_rows; empty if the tile has none
  Band band;
  bool reversed = false;

  bool whole() const { return band.unbounded_below() && band.unbounded_above(); }
  // Each query counts the keys up to its own index; this is what every operator calls causal.
  bool lower_triangle() const { return band.unbounded_below() && band.hi == 0; }
};

// Rectangles that contain each counted pair of the tile once. If the strides of queries and keys differ, their
// positions are divided into classes modulo the least common multiple of the strides, so that the band over positions
// becomes one over indices. Returns nothing if there would be more than `most` pairs of classes, and an empty list if
// the tile counts no pair. For example strides 2 and 3 give classes modulo 6: 3 x 2 pairs of classes.
std::optional<std::vector<Rectangle>> rectangles_of(const Tile& tile, int64_t most = 64);

// Rectangles without a band and lower triangles that contain each counted pair of `rectangle` once. A band of width w
// over n rows gives about 3 n / w of them, of three shapes.
std::vector<Rectangle> triangles_of(const Rectangle& rectangle);

}  // namespace annulus
