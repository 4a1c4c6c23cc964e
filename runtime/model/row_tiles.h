// The tiles of rows over which a layer computes. Used by decoder_layer.cc and decoder_layer_charges.cc. Thread safe.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace annulus {

struct RowTile {
  int64_t begin = 0, count = 0;  // rows
};

// Divides batch * length rows into tiles of at most `most`: several rows of the batch, or equal parts of one.
inline std::vector<RowTile> row_tiles(int64_t batch, int64_t length, int64_t most) {
  const int64_t rows = batch * length;
  if (rows <= most) return {{0, rows}};
  std::vector<RowTile> tiles;
  if (length <= most) {
    const int64_t step = most / length * length;
    for (int64_t begin = 0; begin < rows; begin += step) tiles.push_back({begin, std::min(step, rows - begin)});
    return tiles;
  }
  const int64_t pieces = (length + most - 1) / most;
  for (int64_t row = 0; row < batch; ++row) {
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const int64_t begin = length * piece / pieces, end = length * (piece + 1) / pieces;
      tiles.push_back({row * length + begin, end - begin});
    }
  }
  return tiles;
}

}  // namespace annulus
