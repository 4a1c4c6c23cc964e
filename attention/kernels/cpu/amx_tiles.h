// Products of pairs of bf16 by AMX tile instructions, for the table of functions in bf16_pairs.cc. A tile holds 16 rows
// of 16 32-bit elements, and an instruction adds the product of two tiles of pairs to a tile of fp32.
#pragma once

#include <cstdint>

#include "attention/kernels/cpu/tile_math.h"

namespace annulus::amx_tiles {

constexpr int64_t kRows = 32, kPanel = 32;          // 2 x 2 tiles: four accumulators, and two tiles for each operand
constexpr int64_t kDepth = 16;                      // the pairs that an instruction sums over
constexpr int64_t kMostTurned = kMostRowsHeld / 2;  // pairs of the rows whose scores the backward holds

// As in TileMath, with sums over a multiple of kDepth elements (at most kMostTurned unless a_column is 1), and runs and
// `dim` multiples of kPanel.
void scores(int64_t used, const float* a, int64_t a_step, const float* panels, int64_t length, Run run, float* s,
            int64_t s_step);
void add_product(int64_t used, const float* a, int64_t a_row, int64_t a_column, const float* b, int64_t b_step,
                 int64_t n, float* c, int64_t c_step, int64_t dim, const float* keep, bool set);

}  // namespace annulus::amx_tiles
