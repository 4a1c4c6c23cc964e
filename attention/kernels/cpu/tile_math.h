// The vector code of flash attention on CPUs. It packs rows for products, multiplies blocks that stay in the caches
// with results that accumulate in registers, and makes the passes of softmax over rows of scores. It is compiled once
// for each instruction set (common/simd/versions.h). Used by flash.cc, which has the algorithm.
//
// The products follow Goto and van de Geijn (Anatomy of High-Performance Matrix Multiplication, ACM TOMS 34, 2008):
// each step adds the products of `rows` broadcast elements and `panel` adjacent elements to a register tile of `rows` x
// `panel` elements.
//
// With AVX-512 BF16 a multiplication of 32-bit elements is a product of two pairs of bf16, which adds two products to
// an fp32 sum; AMX multiplies whole tiles of such elements (amx_tiles.h). So there are two tables of functions for
// fp32: tile_math<float>(), whose operands are numbers, and tile_math_of_pairs(), whose operands are pairs: the bits of
// two bf16 in the place of one fp32. The two bf16 are those that a product adds up: neighbours along the head's
// dimensions in `copy` and `transpose`, and neighbouring rows in `stack`. With k = (1 2 3 4), (5 6 7 8), transpose
// makes two rows of pairs, (1,2) (5,6) and (3,4) (7,8), and stack makes one, (1,5) (2,6) (3,7) (4,8).
#pragma once

#include <cstdint>

namespace annulus {

// The type of elements in memory. bf16 and fp16 are widened to fp32 when they are packed.
enum class Storage { kFloat, kDouble, kBFloat16, kHalf };

// The bytes of an element.
constexpr int64_t width_of(Storage storage) {
  return storage == Storage::kDouble ? 8 : storage == Storage::kFloat ? 4 : 2;
}

// Rows to read, `step` elements apart.
struct StoredRows {
  const void* data = nullptr;
  int64_t step = 0;
  Storage storage = Storage::kFloat;
};

// How `put` writes a row: it sets a row of T, adds to one, or sets a row of bf16 to what is rounded to nearest.
enum class Put { kSet, kAdd, kRound };

// The most rows that a tile of registers has with any instructions, and the most rows of scores that the backward
// holds.
inline constexpr int64_t kMostTileRows = 32, kMostRowsHeld = 128;

// Columns [first, past) of a row of scores.
struct Run {
  int64_t first = 0, past = 0;

  bool empty() const { return first >= past; }
  bool operator==(const Run&) const = default;
};

// T is float or double. A pointer to the rows of a tile must point to `rows` rows. Only the first `used` of them need
// be computed (1 <= used <= rows): the others may hold anything, and become meaningless. Products compute a third, two
// thirds or all of the rows, with AMX a half or all. Buffers of columns are padded to whole panels.
// "Elements" of operands are pairs in the table for pairs, where `dim` of copy, transpose and stack must be even and
// the storage bf16. All functions are thread safe.
template <typename T>
struct TileMath {
  int64_t rows, panel;  // of a tile of registers: its rows, at most kMostTileRows, and its columns
  int64_t lanes;        // the columns that are computed at a time, a multiple of a vector and a divisor of panel
  int64_t together;     // the numbers in an element of an operand: 1, or 2 in the table for pairs
  int64_t depth;        // products add up a multiple of so many elements

  // The query rows whose scores the backward holds at once, at most kMostRowsHeld and a multiple of rows: few enough
  // for the second-level cache, and enough that dk and dv are read and written rarely.
  int64_t held;

  // Packs rows: element i of to + j * to_step is that of row j of x, scaled, and 0 for i in [dim / together, to_step).
  // The table for pairs does not scale.
  void (*copy)(const StoredRows& x, int64_t n, int64_t dim, T scale, T* to, int64_t to_step);

  // Packs rows as columns: row j of x becomes column `column` + j of the panels. A panel stores dim / together rows of
  // `panel` adjacent columns, and rows of zeros up to a multiple of depth. Other columns stay unchanged.
  void (*transpose)(const StoredRows& x, int64_t n, int64_t dim, T* panels, int64_t column);

  // Packs rows as the second operand of add_product: rows `row`, ..., `row` + n - 1 of it become those of x, and 0
  // behind `dim`. In the table for pairs two rows share their elements; the second one is 0 until it is packed, and
  // must not be packed before the first.
  void (*stack)(const StoredRows& x, int64_t n, int64_t dim, T* to, int64_t to_step, int64_t row);

  // to[j * to_step] = the dot product of row j of x and row j of y, n rows of the same storage.
  void (*dots)(const StoredRows& x, const StoredRows& y, int64_t n, int64_t dim, T* to, int64_t to_step);

  // Whether no element of the n rows is infinite or NaN.
  bool (*finite)(const StoredRows& x, int64_t n, int64_t dim);

  // s[r][c] = sum over elements i < length of a[r][i] * panels(i, c) for the columns c of the run. run.first and
  // run.past are multiples of lanes.
  void (*scores)(int64_t used, const T* a, int64_t a_step, const T* panels, int64_t length, Run run, T* s,
                 int64_t s_step);

  // c[r][i] = keep[r] * c[r][i] + sum over elements j < n of a[r * a_row + j * a_column] * b[j * b_step + i], for i <
  // dim, where dim is a multiple of lanes. If keep is null, keep[r] is 1. c holds numbers. With `set`, c may hold
  // anything and keep is null: c[r][i] becomes the sum alone. The table for numbers adds c to the sum at the end.
  void (*add_product)(int64_t used, const T* a, int64_t a_row, int64_t a_column, const T* b, int64_t b_step, int64_t n,
                      T* c, int64_t c_step, int64_t dim, const T* keep, bool set);

  // Sets the scores of columns [from[r], past[r]) of each row to -inf; none if past[r] <= from[r].
  void (*hide)(int64_t used, T* s, int64_t s_step, const int64_t* from, const int64_t* past);

  // One step of the running softmax (FlashAttention 2, algorithm 1). For each row, maximum = max(maximum, scale * its
  // scores), keep = exp(old maximum - maximum), scores = exp(scale * scores - maximum), which is exactly 0 for -inf,
  // and sum = keep * sum + the sum of its new scores. scale * scores is rounded to T, so that it is at most the maximum
  // however large scores are. NaN are ignored in the maximum. scale > 0. The ends of the runs are multiples of lanes.
  // With dropout the new scores are then multiplied by `factors`, which are stored like them, must be finite, and are
  // null otherwise.
  void (*softmax)(int64_t used, T* s, int64_t s_step, const Run* runs, int64_t count, T scale, const T* factors,
                  T* maximum, T* sum, T* keep);

  // For each row and the columns of the runs, p = exp(scale * p - lse), where scale * p is rounded as in softmax, and
  // ds = p * (ds - delta). With dropout, ds = p * (factors * ds - delta), and p is multiplied by its factors.
  void (*gradient)(int64_t used, T* p, T* ds, int64_t step, const Run* runs, int64_t count, T scale, const T* factors,
                   const T* lse, const T* delta);

  // to[i] = factor * from[i] for i < dim, or with kAdd, to[i] += factor * from[i]. kRound is for float only.
  void (*put)(const T* from, int64_t dim, T factor, void* to, Put how);

  // Only in the table for pairs, otherwise null. Make rows of numbers operands, rounded to bf16.
  // narrow: element c / 2 of each of the first `used` rows is the pair of the row's numbers c and c + 1, for the
  // columns of the runs, whose ends are multiples of lanes. `to` may be s.
  void (*narrow)(int64_t used, const T* s, int64_t s_step, const Run* runs, int64_t count, T* to, int64_t to_step);
  // zip: of the first `used` rows, an even number, row 2 r becomes the pairs of the numbers of rows 2 r and 2 r + 1,
  // and what row 2 r + 1 holds is not changed. `columns` is a multiple of lanes.
  void (*zip)(int64_t used, T* s, int64_t s_step, int64_t columns);

  // Null, or called by a thread before and after its products.
  void (*begin)() = nullptr;
  void (*end)() = nullptr;
};

// The functions for the instruction set of this process (common/simd/instruction_set.h).
template <typename T>
const TileMath<T>& tile_math();

// The functions on pairs of bf16; null without AVX-512 BF16 and AMX. Its products treat denormal numbers as 0.
const TileMath<float>* tile_math_of_pairs();

}  // namespace annulus
