// Products of pairs of bf16 by the tile instructions of AMX, for the table of functions in bf16_pairs.cc. A tile holds
// 16 rows of 16 elements of 32 bits, and an instruction adds the products of two tiles of pairs to a tile of numbers.
#pragma once

#include <cstdint>

#include "attention/kernels/cpu/tile_math.h"

namespace annulus::amx_tiles {

constexpr int64_t kRows = 32, kPanel = 32;          // two tiles by two: four sums, and two tiles for each operand
constexpr int64_t kDepth = 16;                      // the pairs that an instruction adds up
constexpr int64_t kMostTurned = kMostRowsHeld / 2;  // pairs of the rows whose scores the backward holds

// As in TileMath. In addition, the sums are over a multiple of kDepth elements, which are at most kMostTurned where
// a_column is not 1, and runs and `dim` are multiples of kPanel.
void scores(int64_t used, const float* a, int64_t a_step, const float* panels, int64_t length, Run run, float* s,
            int64_t s_step);
void add_product(int64_t used, const float* a, int64_t a_row, int64_t a_column, const float* b, int64_t b_step,
                 int64_t n, float* c, int64_t c_step, int64_t dim, const float* keep, bool set);

}  // namespace annulus::amx_tiles
