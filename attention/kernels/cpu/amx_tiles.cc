// Implements amx_tiles.h. Tiles 0 to 3 hold the sums, 4 and 5 rows of the first operand, 6 and 7 those of the second.
#include "attention/kernels/cpu/amx_tiles.h"

#include "common/simd/amx.h"
#include "common/simd/avx512_bf16.h"

#if HWY_ARCH_X86_64
HWY_PUSH_ATTRIBUTES(ANNULUS_AVX512_BF16)
namespace annulus::amx_tiles {
namespace {

constexpr int64_t kSide = 16, kWidth = sizeof(float);

// sums += the products of `n` columns of a and rows of b. Without `both`, only those of the first 16 rows of a.
template <bool both>
HWY_INLINE void multiply(const float* a, int64_t a_step, const float* b, int64_t b_step, int64_t n) {
  const float* const low = a + kSide * a_step;
  for (int64_t j = 0; j < n; j += kDepth) {
    ANNULUS_TILE_LOAD(6, b + j * b_step, b_step * kWidth);
    ANNULUS_TILE_LOAD(7, b + j * b_step + kSide, b_step * kWidth);
    ANNULUS_TILE_LOAD(4, a + j, a_step * kWidth);
    ANNULUS_TILE_MULTIPLY(0, 4, 6);
    ANNULUS_TILE_MULTIPLY(1, 4, 7);
    if constexpr (both) {
      ANNULUS_TILE_LOAD(5, low + j, a_step * kWidth);
      ANNULUS_TILE_MULTIPLY(2, 5, 6);
      ANNULUS_TILE_MULTIPLY(3, 5, 7);
    }
  }
}

template <bool both>
HWY_INLINE void clear_sums() {
  ANNULUS_TILE_ZERO(0);
  ANNULUS_TILE_ZERO(1);
  if constexpr (both) {
    ANNULUS_TILE_ZERO(2);
    ANNULUS_TILE_ZERO(3);
  }
}

template <bool both>
HWY_INLINE void store_sums(float* c, int64_t c_step) {
  ANNULUS_TILE_STORE(0, c, c_step * kWidth);
  ANNULUS_TILE_STORE(1, c + kSide, c_step * kWidth);
  if constexpr (both) {
    ANNULUS_TILE_STORE(2, c + kSide * c_step, c_step * kWidth);
    ANNULUS_TILE_STORE(3, c + kSide * c_step + kSide, c_step * kWidth);
  }
}

template <bool both>
HWY_INLINE void score_rows(const float* a, int64_t a_step, const float* panels, int64_t length, Run run, float* s,
                           int64_t s_step) {
  for (int64_t column = run.first; column < run.past; column += kPanel) {
    clear_sums<both>();
    multiply<both>(a, a_step, panels + column * length, kPanel, length);
    store_sums<both>(s + column, s_step);
  }
}

template <bool both>
HWY_INLINE void add_rows(const float* a, int64_t a_step, const float* b, int64_t b_step, int64_t n, float* c,
                         int64_t c_step, int64_t dim, bool set) {
  for (int64_t i = 0; i < dim; i += kPanel) {
    if (set) {
      clear_sums<both>();
    } else {
      ANNULUS_TILE_LOAD(0, c + i, c_step * kWidth);
      ANNULUS_TILE_LOAD(1, c + i + kSide, c_step * kWidth);
      if constexpr (both) {
        ANNULUS_TILE_LOAD(2, c + i + kSide * c_step, c_step * kWidth);
        ANNULUS_TILE_LOAD(3, c + i + kSide * c_step + kSide, c_step * kWidth);
      }
    }
    multiply<both>(a, a_step, b + i, b_step, n);
    store_sums<both>(c + i, c_step);
  }
}

// c[r] *= keep[r]. Few rows have a new maximum after the first keys.
HWY_INLINE void scale_rows(int64_t used, float* c, int64_t c_step, int64_t dim, const float* keep) {
  for (int64_t r = 0; r < used; ++r) {
    if (keep[r] == 1) continue;
    const __m512 factor = _mm512_set1_ps(keep[r]);
    float* const row = c + r * c_step;
    for (int64_t i = 0; i < dim; i += kSide) _mm512_storeu_ps(row + i, _mm512_mul_ps(factor, _mm512_loadu_ps(row + i)));
  }
}

HWY_INLINE __m512 lower_pairs(__m512 x, __m512 y) {
  return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)));
}
HWY_INLINE __m512 upper_pairs(__m512 x, __m512 y) {
  return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)));
}

// Row r of `to`, `to_step` elements apart, becomes column r of the 16 x 16 elements at x.
HWY_INLINE void transpose(const float* x, int64_t step, float* to, int64_t to_step) {
  __m512 a[kSide], b[kSide];
#pragma GCC unroll 16
  for (int i = 0; i < kSide; ++i) a[i] = _mm512_loadu_ps(x + i * step);
#pragma GCC unroll 8
  for (int i = 0; i < kSide; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
  // Each 128 bits of a[4 g + k] are the elements k of 4 rows: those of group g, 4 columns in each quarter.
#pragma GCC unroll 4
  for (int i = 0; i < kSide; i += 4) {
    a[i] = lower_pairs(b[i], b[i + 2]);
    a[i + 1] = upper_pairs(b[i], b[i + 2]);
    a[i + 2] = lower_pairs(b[i + 1], b[i + 3]);
    a[i + 3] = upper_pairs(b[i + 1], b[i + 3]);
  }
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    const __m512 even = _mm512_shuffle_f32x4(a[k], a[k + 4], 0x88), odd = _mm512_shuffle_f32x4(a[k], a[k + 4], 0xdd);
    const __m512 even2 = _mm512_shuffle_f32x4(a[k + 8], a[k + 12], 0x88),
                 odd2 = _mm512_shuffle_f32x4(a[k + 8], a[k + 12], 0xdd);
    _mm512_storeu_ps(to + k * to_step, _mm512_shuffle_f32x4(even, even2, 0x88));
    _mm512_storeu_ps(to + (k + 4) * to_step, _mm512_shuffle_f32x4(odd, odd2, 0x88));
    _mm512_storeu_ps(to + (k + 8) * to_step, _mm512_shuffle_f32x4(even, even2, 0xdd));
    _mm512_storeu_ps(to + (k + 12) * to_step, _mm512_shuffle_f32x4(odd, odd2, 0xdd));
  }
}

}  // namespace

void scores(int64_t used, const float* a, int64_t a_step, const float* panels, int64_t length, Run run, float* s,
            int64_t s_step) {
  if (used > kSide) return score_rows<true>(a, a_step, panels, length, run, s, s_step);
  score_rows<false>(a, a_step, panels, length, run, s, s_step);
}

void add_product(int64_t used, const float* a, int64_t a_row, int64_t a_column, const float* b, int64_t b_step,
                 int64_t n, float* c, int64_t c_step, int64_t dim, const float* keep, bool set) {
  if (keep != nullptr) scale_rows(used, c, c_step, dim, keep);
  const auto add = used > kSide ? add_rows<true> : add_rows<false>;
  if (a_column == 1) return add(a, a_row, b, b_step, n, c, c_step, dim, set);
  // A tile is read by rows, and these rows are columns in memory.
  alignas(64) float turned[kRows * kMostTurned];
  for (int64_t r = 0; r < used; r += kSide) {
    for (int64_t j = 0; j < n; j += kSide) {
      transpose(a + r + j * a_column, a_column, turned + r * kMostTurned + j, kMostTurned);
    }
  }
  add(turned, kMostTurned, b, b_step, n, c, c_step, dim, set);
}

}  // namespace annulus::amx_tiles
HWY_POP_ATTRIBUTES
#endif  // HWY_ARCH_X86_64
