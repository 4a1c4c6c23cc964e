// The vector code of flash attention on CPUs: packing rows for products, products of blocks that stay in the caches and
// accumulate in registers, and the passes of softmax over rows of scores. Compiled for each instruction set
// (simd/versions.h). Used by flash.cc, which says what is computed when.
//
// The products are those of Goto and van de Geijn (Anatomy of High-Performance Matrix Multiplication, ACM TOMS 34,
// 2008): a register tile of `rows` x `panel` elements, to which each step adds the product of `rows` broadcast elements
// and `panel` elements that lie side by side.
#pragma once

#include <cstdint>

namespace annulus {

// How elements lie in memory. What is narrower than it is computed in is widened when it is packed.
enum class Storage { kFloat, kDouble, kBFloat16, kHalf };

// Rows to be read, `step` elements apart.
struct StoredRows {
  const void* data = nullptr;
  int64_t step = 0;
  Storage storage = Storage::kFloat;
};

// Columns [first, past) of a row of scores.
struct Run {
  int64_t first = 0, past = 0;
};

// T: float or double. Pointers to rows of a tile are followed by `rows` rows; where fewer count, the others hold
// anything, and what becomes of them is of no use. Buffers of columns are padded to whole panels.
template <typename T>
struct TileMath {
  int64_t rows, panel, lanes;  // panel: a multiple of lanes

  // to[j * to_step + i] = scale * x[j][i], for n rows of `dim` elements, and 0 for i in [dim, to_step).
  void (*copy)(const StoredRows& x, int64_t n, int64_t dim, T scale, T* to, int64_t to_step);

  // Rows as columns: row j of x is column `column` + j of the panels, each of which holds `panel` columns side by side,
  // `dim` times. What no row becomes stays as it is.
  void (*transpose)(const StoredRows& x, int64_t n, int64_t dim, T* panels, int64_t column);

  // s[r][c] = sum over i < dim of a[r][i] * panels(i, c) for the run's columns; run.first and run.past are multiples of
  // lanes.
  void (*scores)(const T* a, int64_t a_step, const T* panels, int64_t dim, Run run, T* s, int64_t s_step);

  // c[r][i] = keep[r] * c[r][i] + sum over j < n of a[r * a_row + j * a_column] * b[j * b_step + i], for i < dim, a
  // multiple of lanes. keep: null for 1.
  void (*add_product)(const T* a, int64_t a_row, int64_t a_column, const T* b, int64_t b_step, int64_t n, T* c,
                      int64_t c_step, int64_t dim, const T* keep);

  // One step of the running softmax (FlashAttention 2, algorithm 1): for each row, maximum = max(maximum, its scores),
  // keep = exp(old maximum - maximum), scores = exp(scores - maximum), exactly 0 for -inf, and sum = keep * sum + their
  // sum. NaN are no maximum. The runs' ends are multiples of lanes.
  void (*softmax)(T* s, int64_t s_step, const Run* runs, int64_t count, T* maximum, T* sum, T* keep);

  // For each row p = exp(p - lse), ds = p * (ds - delta).
  void (*gradient)(T* p, T* ds, int64_t step, const Run* runs, int64_t count, const T* lse, const T* delta);
};

// For the instruction set of this process (simd/instruction_set.h).
template <typename T>
const TileMath<T>& tile_math();

}  // namespace annulus
