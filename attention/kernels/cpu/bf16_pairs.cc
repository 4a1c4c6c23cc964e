// The tables of tile_math.h for pairs of bf16: packing, and products by AVX-512's instruction for bf16, which Debian's
// Highway does not have; amx_tiles.cc has those of AMX. What computes with fp32 (softmax and its gradient) is the table
// for numbers.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "attention/kernels/cpu/amx_tiles.h"
#include "attention/kernels/cpu/tile_math.h"
#include "common/simd/amx.h"
#include "common/simd/avx512_bf16.h"
#include "common/simd/instruction_set.h"

#if HWY_ARCH_X86_64
HWY_PUSH_ATTRIBUTES(ANNULUS_AVX512_BF16)
namespace annulus {
namespace bf16_pairs {

constexpr int kRows = 12;  // a register tile takes 24 of 32 registers
constexpr int kThird = kRows / 3;
constexpr int64_t kLanes = 16, kPanel = 2 * kLanes;

// ---- Packing. x holds bf16, whose two bytes are read as an integer.

// The first n <= 16 numbers at x, each in the lower half of an element; the other elements are 0.
HWY_INLINE __m512i numbers(const uint16_t* x, int64_t n) {
  const auto mask = static_cast<__mmask16>((1u << std::min<int64_t>(n, kLanes)) - 1);
  return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x));
}

const uint16_t* row_of(const StoredRows& x, int64_t j) { return static_cast<const uint16_t*>(x.data) + j * x.step; }

void copy(const StoredRows& x, int64_t n, int64_t dim, float, float* to, int64_t to_step) {
  for (int64_t j = 0; j < n; ++j) {
    std::memcpy(to + j * to_step, row_of(x, j), static_cast<size_t>(dim) * sizeof(uint16_t));
    std::fill(to + j * to_step + dim / 2, to + (j + 1) * to_step, 0.0f);
  }
}

// Pairs of a row are moved like fp32.
void transpose(const StoredRows& x, int64_t n, int64_t dim, float* panels, int64_t column) {
  tile_math<float>().transpose({x.data, x.step / 2, ElementType::kFloat}, n, dim / 2, panels, column);
}

// A panel's rows are filled up with zeros for AMX, one panel at a time because that changes where the next one begins.
void transpose_for_tiles(const StoredRows& x, int64_t n, int64_t dim, float* panels, int64_t column) {
  constexpr int64_t kDepth = amx_tiles::kDepth;
  const int64_t length = (dim / 2 + kDepth - 1) / kDepth * kDepth;
  for (int64_t j = 0; j < n;) {
    const int64_t within = (column + j) % kPanel, count = std::min(n - j, kPanel - within);
    float* const panel = panels + (column + j - within) * length;
    transpose({row_of(x, j), x.step, x.storage}, count, dim, panel, within);
    for (int64_t i = dim / 2; i < length; ++i) std::fill_n(panel + i * kPanel + within, count, 0.0f);
    j += count;
  }
}

void stack(const StoredRows& x, int64_t n, int64_t dim, float* to, int64_t to_step, int64_t row) {
  for (int64_t j = 0; j < n;) {
    float* const pairs = to + (row + j) / 2 * to_step;
    const uint16_t* const first = row_of(x, j);
    const bool second_half = (row + j) % 2 == 1, both = !second_half && j + 1 < n;
    for (int64_t i = 0; i < dim; i += kLanes) {
      __m512i lanes = numbers(first + i, dim - i);
      if (second_half) lanes = _mm512_or_epi32(_mm512_slli_epi32(lanes, 16), _mm512_loadu_si512(pairs + i));
      if (both) lanes = _mm512_or_epi32(lanes, _mm512_slli_epi32(numbers(row_of(x, j + 1) + i, dim - i), 16));
      _mm512_mask_storeu_epi32(pairs + i, static_cast<__mmask16>((1u << std::min(dim - i, kLanes)) - 1), lanes);
    }
    std::fill(pairs + dim, pairs + to_step, 0.0f);
    j += both ? 2 : 1;
  }
}

// ---- Products

HWY_INLINE __m512bh pairs_of(__m512 x) { return (__m512bh)x; }

// sums[r][v] += the sum over j < n of the products of the pairs a[r * a_row + j * a_column] and b[j * b_step + v *
// lanes]. The loops over the tile are fully unrolled, so that it stays in registers.
template <int kUsed, int kVectors>
HWY_INLINE void multiply(const float* HWY_RESTRICT a, int64_t a_row, int64_t a_column, const float* HWY_RESTRICT b,
                         int64_t b_step, int64_t n, __m512 (&sums)[kUsed][kVectors]) {
  constexpr int kPointers = (kUsed + 2) / 3;
  const float* first[kPointers];  // three rows share a pointer, because registers for twelve would not suffice
  for (int g = 0; g < kPointers; ++g) first[g] = a + 3 * g * a_row;
  for (int64_t j = 0; j < n; ++j) {
    __m512bh side[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) side[v] = pairs_of(_mm512_loadu_ps(b + v * kLanes));
    b += b_step;
#pragma GCC unroll 12
    for (int r = 0; r < kUsed; ++r) {
      const __m512bh one = pairs_of(_mm512_set1_ps(first[r / 3][r % 3 * a_row]));
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], one, side[v]);
    }
#pragma GCC unroll 4
    for (int g = 0; g < kPointers; ++g) first[g] += a_column;
  }
}

// Computes a register tile of c, which begins as keep[r] * c[r], as c if keep is null, or as 0 if `set`.
template <int kUsed, int kVectors>
HWY_INLINE void tile(const float* a, int64_t a_row, int64_t a_column, const float* b, int64_t b_step, int64_t n,
                     float* c, int64_t c_step, const float* keep, bool set) {
  __m512 sums[kUsed][kVectors];
#pragma GCC unroll 12
  for (int r = 0; r < kUsed; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = set ? _mm512_setzero_ps() : _mm512_loadu_ps(c + r * c_step + v * kLanes);
      if (keep != nullptr) sums[r][v] = _mm512_mul_ps(_mm512_set1_ps(keep[r]), sums[r][v]);
    }
  }
  multiply(a, a_row, a_column, b, b_step, n, sums);
#pragma GCC unroll 12
  for (int r = 0; r < kUsed; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) _mm512_storeu_ps(c + r * c_step + v * kLanes, sums[r][v]);
  }
}

template <int kUsed>
HWY_INLINE void score_rows(const float* a, int64_t a_step, const float* panels, int64_t length, Run run, float* s,
                           int64_t s_step) {
  for (int64_t c = run.first; c < run.past;) {
    const int64_t within = c % kPanel;
    const float* const panel = panels + (c - within) * length + within;
    if (within == 0 && c + kPanel <= run.past) {
      tile<kUsed, 2>(a, a_step, 1, panel, kPanel, length, s + c, s_step, nullptr, true);
      c += kPanel;
    } else {
      tile<kUsed, 1>(a, a_step, 1, panel, kPanel, length, s + c, s_step, nullptr, true);
      c += kLanes;
    }
  }
}

void scores(int64_t used, const float* a, int64_t a_step, const float* panels, int64_t length, Run run, float* s,
            int64_t s_step) {
  if (used > 2 * kThird) return score_rows<kRows>(a, a_step, panels, length, run, s, s_step);
  if (used > kThird) return score_rows<2 * kThird>(a, a_step, panels, length, run, s, s_step);
  score_rows<kThird>(a, a_step, panels, length, run, s, s_step);
}

template <int kUsed>
HWY_INLINE void add_rows(const float* a, int64_t a_row, int64_t a_column, const float* b, int64_t b_step, int64_t n,
                         float* c, int64_t c_step, int64_t dim, const float* keep, bool set) {
  int64_t i = 0;
  for (; i + kPanel <= dim; i += kPanel) {
    tile<kUsed, 2>(a, a_row, a_column, b + i, b_step, n, c + i, c_step, keep, set);
  }
  for (; i < dim; i += kLanes) tile<kUsed, 1>(a, a_row, a_column, b + i, b_step, n, c + i, c_step, keep, set);
}

void add_product(int64_t used, const float* a, int64_t a_row, int64_t a_column, const float* b, int64_t b_step,
                 int64_t n, float* c, int64_t c_step, int64_t dim, const float* keep, bool set) {
  if (used > 2 * kThird) return add_rows<kRows>(a, a_row, a_column, b, b_step, n, c, c_step, dim, keep, set);
  if (used > kThird) return add_rows<2 * kThird>(a, a_row, a_column, b, b_step, n, c, c_step, dim, keep, set);
  add_rows<kThird>(a, a_row, a_column, b, b_step, n, c, c_step, dim, keep, set);
}

// ---- Rows of scores

HWY_INLINE __m512i rounded(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

void narrow(int64_t used, const float* s, int64_t s_step, const Run* runs, int64_t count, float* to, int64_t to_step) {
  for (int64_t r = 0; r < used; ++r) {
    const float* const from = s + r * s_step;
    float* const pairs = to + r * to_step;
    for (const Run* run = runs; run != runs + count; ++run) {
      int64_t c = run->first;
      for (; c + 2 * kLanes <= run->past; c += 2 * kLanes) {
        const __m512 low = _mm512_loadu_ps(from + c), high = _mm512_loadu_ps(from + c + kLanes);
        _mm512_storeu_si512(pairs + c / 2, rounded(low, high));
      }
      if (c == run->past) continue;
      const __m256bh narrowed = _mm512_cvtneps_pbh(_mm512_loadu_ps(from + c));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(pairs + c / 2), (__m256i)narrowed);
    }
  }
}

// The places of the numbers of rounded(first, second) if the two take turns.
HWY_INLINE __m512i in_turns() {
  alignas(64) static constexpr uint16_t kPlaces[2 * kLanes] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                               21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                               11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_load_si512(kPlaces);
}

void zip(int64_t used, float* s, int64_t s_step, int64_t columns) {
  const __m512i places = in_turns();
  for (int64_t r = 0; r < used; r += 2) {
    float *const first = s + r * s_step, *const second = first + s_step;
    for (int64_t c = 0; c < columns; c += kLanes) {
      const __m512i both = rounded(_mm512_loadu_ps(first + c), _mm512_loadu_ps(second + c));
      _mm512_storeu_si512(first + c, _mm512_permutexvar_epi16(places, both));
    }
  }
}

}  // namespace bf16_pairs
}  // namespace annulus
HWY_POP_ATTRIBUTES
#endif  // HWY_ARCH_X86_64

namespace annulus {

const TileMath<float>* tile_math_of_pairs() {
#if HWY_ARCH_X86_64
  static const TileMath<float> by_vectors = {.rows = bf16_pairs::kRows,
                                             .panel = bf16_pairs::kPanel,
                                             .lanes = bf16_pairs::kLanes,
                                             .together = 2,
                                             .depth = 1,
                                             .held = 48,
                                             .copy = bf16_pairs::copy,
                                             .transpose = bf16_pairs::transpose,
                                             .stack = bf16_pairs::stack,
                                             .dots = tile_math<float>().dots,
                                             .finite = tile_math<float>().finite,
                                             .scores = bf16_pairs::scores,
                                             .add_product = bf16_pairs::add_product,
                                             .cap = tile_math<float>().cap,
                                             .hide = tile_math<float>().hide,
                                             .hide_bits = tile_math<float>().hide_bits,
                                             .softmax = tile_math<float>().softmax,
                                             .gradient = tile_math<float>().gradient,
                                             .put = tile_math<float>().put,
                                             .narrow = bf16_pairs::narrow,
                                             .zip = bf16_pairs::zip};
  static const TileMath<float> by_tiles = [] {
    TileMath<float> math = by_vectors;
    math.rows = amx_tiles::kRows, math.panel = math.lanes = amx_tiles::kPanel, math.depth = amx_tiles::kDepth;
    math.held = 128;
    math.transpose = bf16_pairs::transpose_for_tiles;
    math.scores = amx_tiles::scores, math.add_product = amx_tiles::add_product;
    math.begin = configure_tiles, math.end = release_tiles;
    return math;
  }();
  if (instruction_set() == InstructionSet::kAmx) return &by_tiles;
  if (instruction_set() == InstructionSet::kAvx512Bf16) return &by_vectors;
#endif
  return nullptr;
}

}  // namespace annulus
