// The vector code of flash attention on CPUs: packing rows for products, cache-blocked products with accumulators in
// registers, and the passes of softmax over rows of scores. It is compiled once for each instruction set
// (common/simd/versions.h). Used by flash.cc, which has the algorithm.
//
// The products follow Goto and van de Geijn (Anatomy of High-Performance Matrix Multiplication, ACM TOMS 34, 2008):
// each step adds the products of `rows` broadcast elements and `panel` adjacent elements to a register tile of `rows` x
// `panel` elements.
//
// AVX-512 BF16 multiplies 32-bit elements that are pairs of bf16, and adds both products to an fp32 accumulator; AMX
// does so for whole tiles (amx_tiles.h). So there are two tables of functions for fp32: tile_math<float>(), whose
// operands are numbers, and tile_math_of_pairs(), whose operands are pairs: two bf16 in the bits of one fp32. A pair is
// adjacent in the dimension that a product sums over: the head dimension in `copy` and `transpose`, rows in `stack`.
// With k = (1 2 3 4), (5 6 7 8), transpose makes two rows of pairs, (1,2) (5,6) and (3,4) (7,8), and stack makes one,
// (1,5) (2,6) (3,7) (4,8).
#pragma once

#include <cstdint>

namespace annulus {

// The dtype of elements in memory. bf16 and fp16 are widened to fp32 when packed.
enum class ElementType { kFloat, kDouble, kBFloat16, kHalf };

// Returns the bytes of an element.
constexpr int64_t width_of(ElementType storage) {
  return storage == ElementType::kDouble ? 8 : storage == ElementType::kFloat ? 4 : 2;
}

// Rows to read, `step` elements apart.
struct StoredRows {
  const void* data = nullptr;
  int64_t step = 0;
  ElementType storage = ElementType::kFloat;
};

// How `put` writes a row: sets a row of T, adds to one, or sets a row of bf16, rounding to nearest.
enum class Put { kSet, kAdd, kRound };

// The maxima over all instruction sets of TileMath::rows and TileMath::held.
inline constexpr int64_t kMostTileRows = 32, kMostRowsHeld = 128;

// Columns [first, past) of a row of scores.
struct Run {
  int64_t first = 0, past = 0;

  bool empty() const { return first >= past; }
  bool operator==(const Run&) const = default;
};

// T is float or double. A pointer to the rows of a tile must point to `rows` rows. Only the first `used` of them are
// valid (1 <= used <= rows); the others may be read and overwritten with garbage. Products compute a third, two thirds
// or all of the rows, with AMX a half or all. Buffers of columns are padded to whole panels.
// "Elements" of operands are pairs in the table for pairs, where `dim` of copy, transpose and stack must be even and
// the storage bf16. All functions are thread safe.
template <typename T>
struct TileMath {
  int64_t rows, panel;  // of a register tile: rows, at most kMostTileRows, and columns
  int64_t lanes;        // the granularity of columns: a multiple of a vector and a divisor of panel
  int64_t together;     // numbers per element of an operand: 1, or 2 in the table for pairs
  int64_t depth;        // products sum over a multiple of so many elements

  // The query rows whose scores the backward holds at once, at most kMostRowsHeld and a multiple of rows: few enough
  // for the L2 cache, and enough that dk and dv are rarely loaded and stored.
  int64_t held;

  // Packs rows: element i of to + j * to_step is that of row j of x, scaled, and 0 for i in [dim / together, to_step).
  // The table for pairs does not scale.
  void (*copy)(const StoredRows& x, int64_t n, int64_t dim, T scale, T* to, int64_t to_step);

  // Packs rows as columns: row j of x becomes column `column` + j of the panels. A panel stores dim / together rows of
  // `panel` adjacent columns, and rows of zeros up to a multiple of depth. Other columns stay unchanged.
  void (*transpose)(const StoredRows& x, int64_t n, int64_t dim, T* panels, int64_t column);

  // Packs rows as the second operand of add_product: its rows `row`, ..., `row` + n - 1 become those of x, padded with
  // 0 beyond `dim`. In the table for pairs two rows share their elements; the second is 0 until it is packed, and must
  // not be packed before the first.
  void (*stack)(const StoredRows& x, int64_t n, int64_t dim, T* to, int64_t to_step, int64_t row);

  // to[j * to_step] = dot product of row j of x and row j of y, for n rows of the same storage.
  void (*dots)(const StoredRows& x, const StoredRows& y, int64_t n, int64_t dim, T* to, int64_t to_step);

  // Returns whether all elements of the n rows are finite.
  bool (*finite)(const StoredRows& x, int64_t n, int64_t dim);

  // s[r][c] = sum over elements i < length of a[r][i] * panels(i, c) for the columns c of the run. run.first and
  // run.past are multiples of lanes.
  void (*scores)(int64_t used, const T* a, int64_t a_step, const T* panels, int64_t length, Run run, T* s,
                 int64_t s_step);

  // c[r][i] = keep[r] * c[r][i] + sum over elements j < n of a[r * a_row + j * a_column] * b[j * b_step + i], for i <
  // dim, where dim is a multiple of lanes. If keep is null, keep[r] is 1. c holds numbers. With `set`, keep is null and
  // c is overwritten by the sum. The table for numbers adds c to the sum at the end.
  void (*add_product)(int64_t used, const T* a, int64_t a_row, int64_t a_column, const T* b, int64_t b_step, int64_t n,
                      T* c, int64_t c_step, int64_t dim, const T* keep, bool set);

  // Replaces the scores s of the runs, whose ends are multiples of lanes, by softcap * tanh(scale / softcap * s). The
  // relative error of tanh is at most 8 unit roundoffs; NaN stay NaN. softcap > 0.
  void (*cap)(int64_t used, T* s, int64_t s_step, const Run* runs, int64_t count, T scale, T softcap);

  // Sets the scores of columns [from[r], past[r]) of each row to -inf; none if past[r] <= from[r].
  void (*hide)(int64_t used, T* s, int64_t s_step, const int64_t* from, const int64_t* past);

  // Sets the scores of the columns of the runs to -inf whose bits are 0: bit c % 64 of word c / 64 of a row of `shown`,
  // whose rows are shown_step words apart, belongs to column c. The ends of the runs are multiples of lanes.
  void (*hide_bits)(int64_t used, T* s, int64_t s_step, const Run* runs, int64_t count, const uint64_t* shown,
                    int64_t shown_step);

  // One step of the running softmax (FlashAttention 2, algorithm 1). For each row, maximum = max(maximum, scale *
  // scores), keep = exp(old maximum - maximum), scores = exp(scale * scores - maximum), which is exactly 0 for -inf,
  // and sum = keep * sum + the sum of the new scores. scale * scores is rounded to T (no fused multiply-add), so that
  // it never exceeds the maximum. The maximum ignores NaN. scale > 0. The ends of the runs are multiples of lanes. With
  // dropout the new scores are then multiplied by `factors`, which have the layout of s and must be finite; null: no
  // dropout.
  void (*softmax)(int64_t used, T* s, int64_t s_step, const Run* runs, int64_t count, T scale, const T* factors,
                  T* maximum, T* sum, T* keep);

  // For each row and the columns of the runs, p = exp(scale * p - lse), where scale * p is rounded as in softmax, and
  // ds = p * (ds - delta). With dropout, ds = p * (factors * ds - delta), and p is multiplied by its factors. With
  // per_cap > 0 the scores, scale * p, are those of `cap` with the soft cap 1 / per_cap, and ds is then multiplied by
  // the derivative, 1 - tanh^2, which is taken as 0 where a score is -inf.
  void (*gradient)(int64_t used, T* p, T* ds, int64_t step, const Run* runs, int64_t count, T scale, T per_cap,
                   const T* factors, const T* lse, const T* delta);

  // to[i] = factor * from[i] for i < dim, or with kAdd, to[i] += factor * from[i]. kRound is for float only.
  void (*put)(const T* from, int64_t dim, T factor, void* to, Put how);

  // Only in the table for pairs, otherwise null. They convert rows of numbers to operands, rounded to bf16.
  // narrow: element c / 2 of each of the first `used` rows is the pair of the row's numbers c and c + 1, for the
  // columns of the runs, whose ends are multiples of lanes. `to` may be s.
  void (*narrow)(int64_t used, const T* s, int64_t s_step, const Run* runs, int64_t count, T* to, int64_t to_step);
  // zip: row 2 r of the first `used` rows, an even number, becomes the pairs of rows 2 r and 2 r + 1; row 2 r + 1 is
  // not changed. `columns` is a multiple of lanes.
  void (*zip)(int64_t used, T* s, int64_t s_step, int64_t columns);

  // If not null, a thread calls them before and after its products.
  void (*begin)() = nullptr;
  void (*end)() = nullptr;
};

// Returns the functions for this process's instruction set (common/simd/instruction_set.h).
template <typename T>
const TileMath<T>& tile_math();

// Returns the functions on pairs of bf16; null without AVX-512 BF16 and AMX. Their products flush denormal numbers to
// 0.
const TileMath<float>* tile_math_of_pairs();

}  // namespace annulus
