// Packs rows as operands of products: widens them to the compute dtype, scales, and copies or transposes them into
// panels. Vector code of tile_math.cc, which includes this header once for each instruction set
// (common/simd/versions.h), outside HWY_BEFORE_NAMESPACE.

#if defined(ANNULUS_ATTENTION_CPU_FLASH_PACKING_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANNULUS_ATTENTION_CPU_FLASH_PACKING_INL_H_
#undef ANNULUS_ATTENTION_CPU_FLASH_PACKING_INL_H_
#else
#define ANNULUS_ATTENTION_CPU_FLASH_PACKING_INL_H_
#endif

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "attention/kernels/cpu/tile_math.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace annulus {
namespace tile_math_versions {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <typename T>
using Tag = hn::ScalableTag<T>;
template <typename T>
using Vec = hn::Vec<Tag<T>>;
template <typename T>
constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(Tag<T>()));

// The number of columns of a panel.
template <typename T>
constexpr int64_t kPanel = 2 * kLanes<T>;

template <typename T, typename S>
HWY_INLINE Vec<T> widened(const S* x) {
  const Tag<T> d;
  if constexpr (std::is_same_v<S, T>) {
    return hn::LoadU(d, x);
  } else if constexpr (std::is_same_v<S, hwy::bfloat16_t>) {
    const hn::Rebind<uint16_t, Tag<T>> narrow;
    const hn::Rebind<uint32_t, Tag<T>> wide;
    const auto bits = hn::PromoteTo(wide, hn::LoadU(narrow, reinterpret_cast<const uint16_t*>(x)));
    return hn::BitCast(d, hn::ShiftLeft<16>(bits));
  } else {
    const auto wide = hn::PromoteTo(d, hn::LoadU(hn::Rebind<S, Tag<T>>(), x));
#if HWY_TARGET <= HWY_AVX2
    return wide;
#else
    // Without F16C Highway converts infinities and NaN as if they were finite, so correct them here.
    const hn::Rebind<uint16_t, Tag<T>> narrow;
    const hn::Rebind<uint32_t, Tag<T>> bits;
    const auto half = hn::PromoteTo(bits, hn::LoadU(narrow, reinterpret_cast<const uint16_t*>(x)));
    const auto exponent = hn::Set(bits, 0x7C00u);
    const auto no_number = hn::Eq(hn::And(half, exponent), exponent);
    const auto mended = hn::Or(hn::BitCast(bits, wide), hn::IfThenElseZero(no_number, hn::Set(bits, 0x7F800000u)));
    return hn::BitCast(d, mended);
#endif
  }
}

// Returns the last elements of a row, fewer than a vector holds, padded with zeros.
template <typename T, typename S>
HWY_INLINE Vec<T> widened_rest(const S* x, int64_t count) {
  S some[kLanes<T>] = {};
  std::memcpy(some, x, static_cast<size_t>(count) * sizeof(S));
  return widened<T>(some);
}

template <typename T, typename S>
HWY_INLINE void copy_row(const S* x, int64_t dim, T scale, T* to, int64_t to_step) {
  const Tag<T> d;
  const auto s = hn::Set(d, scale);
  int64_t i = 0;
  for (; i + kLanes<T> <= dim; i += kLanes<T>) hn::StoreU(hn::Mul(s, widened<T>(x + i)), d, to + i);
  if (i < dim) {
    T wide[kLanes<T>];
    hn::StoreU(hn::Mul(s, widened_rest<T>(x + i, dim - i)), d, wide);
    std::memcpy(to + i, wide, static_cast<size_t>(dim - i) * sizeof(T));
  }
  std::fill(to + dim, to + to_step, T{0});
}

// The prefetch distance in rows. The hardware prefetcher does not follow the rows of one head among those of all heads.
constexpr int64_t kAhead = 16;

template <typename S>
HWY_INLINE void fetch_row(const S* row, int64_t dim) {
  constexpr int64_t kLine = 64 / sizeof(S);
  for (int64_t i = 0; i < dim; i += kLine) __builtin_prefetch(row + i);
}

template <typename T, typename S>
HWY_INLINE void copy_of(const StoredRows& x, int64_t n, int64_t dim, T scale, T* to, int64_t to_step) {
  const S* from = static_cast<const S*>(x.data);
  for (int64_t j = 0; j < n; ++j) {
    if (j + kAhead < n) fetch_row(from + (j + kAhead) * x.step, dim);
    copy_row(from + j * x.step, dim, scale, to + j * to_step, to_step);
  }
}

// Uses two accumulators, to hide the latency of the multiply-adds.
template <typename T, typename S>
HWY_INLINE void dots_of(const StoredRows& x, const StoredRows& y, int64_t n, int64_t dim, T* to, int64_t to_step) {
  const Tag<T> d;
  for (int64_t j = 0; j < n; ++j) {
    const S* const a = static_cast<const S*>(x.data) + j * x.step;
    const S* const b = static_cast<const S*>(y.data) + j * y.step;
    auto even = hn::Zero(d), odd = hn::Zero(d);
    int64_t i = 0;
    for (; i + 2 * kLanes<T> <= dim; i += 2 * kLanes<T>) {
      even = hn::MulAdd(widened<T>(a + i), widened<T>(b + i), even);
      odd = hn::MulAdd(widened<T>(a + i + kLanes<T>), widened<T>(b + i + kLanes<T>), odd);
    }
    for (; i + kLanes<T> <= dim; i += kLanes<T>) even = hn::MulAdd(widened<T>(a + i), widened<T>(b + i), even);
    if (i < dim) odd = hn::MulAdd(widened_rest<T>(a + i, dim - i), widened_rest<T>(b + i, dim - i), odd);
    to[j * to_step] = hn::GetLane(hn::SumOfLanes(d, hn::Add(even, odd)));
  }
}

// Multiplies by 0 and adds: the sum is 0 for finite numbers, and NaN otherwise.
template <typename T, typename S>
HWY_INLINE bool finite_of(const StoredRows& x, int64_t n, int64_t dim) {
  const Tag<T> d;
  const auto zero = hn::Zero(d);
  auto even = zero, odd = zero;
  for (int64_t j = 0; j < n; ++j) {
    const S* const row = static_cast<const S*>(x.data) + j * x.step;
    int64_t i = 0;
    for (; i + 2 * kLanes<T> <= dim; i += 2 * kLanes<T>) {
      even = hn::MulAdd(widened<T>(row + i), zero, even);
      odd = hn::MulAdd(widened<T>(row + i + kLanes<T>), zero, odd);
    }
    for (; i + kLanes<T> <= dim; i += kLanes<T>) even = hn::MulAdd(widened<T>(row + i), zero, even);
    if (i < dim) odd = hn::MulAdd(widened_rest<T>(row + i, dim - i), zero, odd);
  }
  return hn::AllFalse(d, hn::IsNaN(hn::Add(even, odd)));
}

// The maximum number of rows transposed at a time, in blocks of 4 x 4, one per 128-bit lane.
#if HWY_TARGET == HWY_SCALAR
constexpr int64_t kTransposed = 4;
HWY_INLINE void transpose_rows(const float* const* x, int64_t count, int64_t dim, float* to, int64_t to_step) {
  for (int64_t i = 0; i < dim; ++i) {
    for (int64_t j = 0; j < count; ++j) to[i * to_step + j] = x[j][i];
  }
}
#else
// Returns elements i, ..., i + 3 of rows 0, 4, 8, ..., one row per 128-bit lane.
HWY_INLINE hn::Vec<hn::FixedTag<float, 4>> four_of(hn::FixedTag<float, 4> d, const float* const* x, int64_t i) {
  return hn::LoadU(d, x[0] + i);
}
template <typename D>
HWY_INLINE hn::Vec<D> four_of(D d, const float* const* x, int64_t i) {
  const hn::Half<D> half;
  return hn::Combine(d, four_of(half, x + hn::MaxLanes(d) / 2, i), four_of(half, x, i));
}

// Sets vector k of `out` to element i + k of each of as many rows as it has lanes.
template <typename D>
HWY_INLINE void transpose_blocks(D d, const float* const* x, int64_t i, hn::Vec<D>* out) {
  const auto a = four_of(d, x, i), b = four_of(d, x + 1, i), c = four_of(d, x + 2, i), e = four_of(d, x + 3, i);
  const auto ac = hn::InterleaveLower(d, a, c), be = hn::InterleaveLower(d, b, e);
  const auto ac2 = hn::InterleaveUpper(d, a, c), be2 = hn::InterleaveUpper(d, b, e);
  out[0] = hn::InterleaveLower(d, ac, be);
  out[1] = hn::InterleaveUpper(d, ac, be);
  out[2] = hn::InterleaveLower(d, ac2, be2);
  out[3] = hn::InterleaveUpper(d, ac2, be2);
}
constexpr int64_t kTransposed = kLanes<float>;

// Writes Lanes(d) rows of fp32 as adjacent columns; dim is a multiple of 4.
template <typename D>
HWY_INLINE void transpose_rows(D d, const float* const* x, int64_t dim, float* to, int64_t to_step) {
  for (int64_t i = 0; i < dim; i += 4) {
    hn::Vec<D> columns[4];
    transpose_blocks(d, x, i, columns);
    for (int k = 0; k < 4; ++k) hn::StoreU(columns[k], d, to + (i + k) * to_step);
  }
}
// Transposes the first `count` rows, 4 or kTransposed.
HWY_INLINE void transpose_rows(const float* const* x, int64_t count, int64_t dim, float* to, int64_t to_step) {
  if (count == kTransposed) return transpose_rows(Tag<float>(), x, dim, to, to_step);
  transpose_rows(hn::FixedTag<float, 4>(), x, dim, to, to_step);
}
#endif

constexpr int64_t kWidened = 512;  // elements of a row that are widened at a time

template <typename T, typename S>
HWY_INLINE void transpose_of(const StoredRows& x, int64_t n, int64_t dim, T* panels, int64_t column) {
  const S* const from = static_cast<const S*>(x.data);
  HWY_ALIGN T wide[kTransposed][kWidened];
  for (int64_t j = 0; j < n;) {
    const int64_t at = column + j;
    T* const to = panels + at / kPanel<T> * kPanel<T> * dim + at % kPanel<T>;
    // Transpose several rows at a time if their columns are in one panel, at a multiple of their number.
    const auto fits = [&](int64_t count) {
      return std::is_same_v<T, float> && j + count <= n && at % count == 0 && kPanel<T> % count == 0;
    };
    const int64_t count = fits(kTransposed) ? kTransposed : fits(4) ? 4 : 1;
    for (int64_t begin = 0; begin < dim; begin += kWidened) {
      const int64_t part = std::min(kWidened, dim - begin);
      const T* rows[kTransposed];
      for (int64_t r = 0; r < count; ++r) {
        const S* const row = from + (j + r) * x.step + begin;
        if constexpr (std::is_same_v<S, T>) {
          rows[r] = row;
        } else {
          copy_row(row, part, T{1}, wide[r], part);
          rows[r] = wide[r];
        }
      }
      T* const target = to + begin * kPanel<T>;
      int64_t done = 0;
      if constexpr (std::is_same_v<T, float>) {
        if (count > 1) transpose_rows(rows, count, done = part / 4 * 4, target, kPanel<T>);
      }
      for (; done < part; ++done) {
        for (int64_t r = 0; r < count; ++r) target[done * kPanel<T> + r] = rows[r][done];
      }
    }
    j += count;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace tile_math_versions
}  // namespace annulus
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
