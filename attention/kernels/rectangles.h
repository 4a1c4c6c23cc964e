// Cuts tiles into rectangles that a library's attention operator accepts: with one stride for queries and keys, with
// bands over row indices instead of positions, and, for operators without bands, into triangles. Works without tensors.
// Used by composition.cc. The functions are thread safe.
#pragma once

#include <optional>
#include <vector>

#include "attention/plan/plan.h"

namespace annulus {

// The product of query rows and key rows. The pair of query index i and key index j (indices into the rows) is counted
// if the band contains j - i. A side of the band that cuts nothing is unbounded. Every row and every key is in some
// counted pair. If `reversed`, indices run backwards from the last row and the last key, which turns lower bounds of
// the band into upper ones.
struct Rectangle {
  Span query_rows;
  Span key_rows;
  Span grad_rows;  // as many as key_rows; empty if the tile has none
  Band band;
  bool reversed = false;

  bool whole() const { return band.unbounded_below() && band.unbounded_above(); }
  // Each query counts the keys up to its own index, the causal mask of every operator.
  bool lower_triangle() const { return band.unbounded_below() && band.hi == 0; }
};

// Returns rectangles that contain each counted pair of the tile once. If the strides of queries and keys differ,
// positions are divided into residue classes modulo the least common multiple of the strides, so that the band over
// positions becomes one over indices: strides 2 and 3 give classes modulo 6, 3 x 2 pairs of them. Returns nullopt for
// more than `most` pairs of classes, and an empty list if the tile counts no pair.
std::optional<std::vector<Rectangle>> rectangles_of(const Tile& tile, int64_t most = 64);

// Returns unbounded rectangles and lower triangles that contain each counted pair of `rectangle` once. A band of width
// w over n rows gives about 3 n / w of them, of three shapes.
std::vector<Rectangle> triangles_of(const Rectangle& rectangle);

}  // namespace annulus
