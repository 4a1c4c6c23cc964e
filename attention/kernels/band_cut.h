// Cuts a banded rectangle into pieces that dense attention operators can do: full, causal from the top left, and its
// mirror image. What is left is small and takes a mask. Used by kernels built on LibTorch's operators. No tensors here.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/plan/plan.h"

namespace annulus {

struct Rectangle {
  enum class Mask {
    kFull,
    kLower,   // keeps key index <= query index, counted from the rectangle's top left
    kUpper,   // keeps key index >= query index; square
    kBanded,  // needs a mask made from positions; at most kMaskedSide on each side
  };
  static constexpr int64_t kMaskedSide = 256;

  Mask mask = Mask::kFull;
  Span queries;  // indices into the tile's rows, stride 1
  Span keys;
};

// Rectangles that together hold each pair of the tile within its band exactly once, and of other pairs only ones that
// their mask drops. `max_rows`: no rectangle has more query rows.
std::vector<Rectangle> cut_band(const Tile& tile, int64_t max_rows);

}  // namespace annulus
