// From tiles to rectangles that a library's attention operator takes: one stride for queries and keys, bands over row
// indices, and, for operators that know no bands, triangles. No tensors here. Used by composition.cc.
#pragma once

#include <optional>
#include <vector>

#include "attention/plan/plan.h"

namespace annulus {

// Query rows times key rows. Pair (i, j), indices into the rows, is counted where the band holds j - i; a side of it
// that cuts nothing is unbounded. Every row and every key is in some counted pair. Where `reversed`, index 0 is the
// last row and the last key: what is cut below in row order is cut above in this one.
struct Rectangle {
  Span query_rows;
  Span key_rows;
  Span grad_rows;  // as key_rows; empty where the tile has none
  Band band;
  bool reversed = false;

  bool whole() const { return band.unbounded_below() && band.unbounded_above(); }
  // Counted are the keys up to the query's own index: what every operator knows as causal.
  bool lower_triangle() const { return band.unbounded_below() && band.hi == 0; }
};

// The tile's counted pairs, each once. A band over positions of different strides becomes one over indices by taking
// the positions apart into classes of the strides' least common multiple; nothing where these would be more than
// `most`. An empty list: the tile counts no pair.
std::optional<std::vector<Rectangle>> rectangles_of(const Tile& tile, int64_t most = 64);

// The rectangle's counted pairs, each once, in rectangles that are whole or lower triangles. A band of width w takes
// about 3 n / w of them, of three shapes.
std::vector<Rectangle> triangles_of(const Rectangle& rectangle);

}  // namespace annulus
