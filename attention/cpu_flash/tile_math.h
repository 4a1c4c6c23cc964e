// The vector code of flash attention on CPUs. It packs rows for products, multiplies blocks that stay in the caches
// with results that accumulate in registers, and makes the passes of softmax over rows of scores. It is compiled once
// for each instruction set (simd/versions.h). Used by flash.cc, which has the algorithm.
//
// The products follow Goto and van de Geijn (Anatomy of High-Performance Matrix Multiplication, ACM TOMS 34, 2008):
// each step adds the products of `rows` broadcast elements and `panel` adjacent elements to a register tile of `rows` x
// `panel` elements.
#pragma once

#include <cstdint>

namespace annulus {

// The type of elements in memory. bf16 and fp16 are widened to fp32 when they are packed.
enum class Storage { kFloat, kDouble, kBFloat16, kHalf };

// Rows to read, `step` elements apart.
struct StoredRows {
  const void* data = nullptr;
  int64_t step = 0;
  Storage storage = Storage::kFloat;
};

// Columns [first, past) of a row of scores.
struct Run {
  int64_t first = 0, past = 0;
};

// T is float or double. A pointer to the rows of a tile must point to `rows` rows. If fewer of them are used, the
// others may hold anything, and their results are meaningless. Buffers of columns are padded to whole panels. All
// functions are thread safe.
template <typename T>
struct TileMath {
  int64_t rows, panel, lanes;  // lanes: elements of a vector; panel: columns of a register tile, a multiple of lanes

  // to[j * to_step + i] = scale * x[j][i], for n rows of `dim` elements, and 0 for i in [dim, to_step).
  void (*copy)(const StoredRows& x, int64_t n, int64_t dim, T scale, T* to, int64_t to_step);

  // Packs rows as columns: row j of x becomes column `column` + j of the panels. A panel stores `dim` rows of `panel`
  // adjacent columns. Other columns stay unchanged.
  void (*transpose)(const StoredRows& x, int64_t n, int64_t dim, T* panels, int64_t column);

  // s[r][c] = sum over i < dim of a[r][i] * panels(i, c) for the columns c of the run. run.first and run.past are
  // multiples of lanes.
  void (*scores)(const T* a, int64_t a_step, const T* panels, int64_t dim, Run run, T* s, int64_t s_step);

  // c[r][i] = keep[r] * c[r][i] + sum over j < n of a[r * a_row + j * a_column] * b[j * b_step + i], for i < dim, where
  // dim is a multiple of lanes. If keep is null, keep[r] is 1.
  void (*add_product)(const T* a, int64_t a_row, int64_t a_column, const T* b, int64_t b_step, int64_t n, T* c,
                      int64_t c_step, int64_t dim, const T* keep);

  // One step of the running softmax (FlashAttention 2, algorithm 1). For each row, maximum = max(maximum, its scores),
  // keep = exp(old maximum - maximum), scores = exp(scores - maximum), which is exactly 0 for -inf, and sum = keep *
  // sum + the sum of its new scores. NaN are ignored in the maximum. The ends of the runs are multiples of lanes.
  void (*softmax)(T* s, int64_t s_step, const Run* runs, int64_t count, T* maximum, T* sum, T* keep);

  // For each row and the columns of the runs, p = exp(p - lse) and ds = p * (ds - delta).
  void (*gradient)(T* p, T* ds, int64_t step, const Run* runs, int64_t count, const T* lse, const T* delta);
};

// The functions for the instruction set of this process (simd/instruction_set.h).
template <typename T>
const TileMath<T>& tile_math();

}  // namespace annulus
