// The vector code of tile_math.h, compiled once for each instruction set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention/kernels/cpu/tile_math.cc"
// clang-format off
#include "common/simd/versions.h"  // must come first
#include "attention/kernels/cpu/packing-inl.h"
#include "attention/kernels/cpu/softcap-inl.h"
#include "common/simd/exponential-inl.h"
// clang-format on

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "attention/kernels/cpu/tile_math.h"

HWY_BEFORE_NAMESPACE();
namespace annulus {
namespace tile_math_versions {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using simd::HWY_NAMESPACE::exponential;
using simd::HWY_NAMESPACE::Exponents;

// A register tile of kRows x 2 vectors leaves registers for two vectors of the second operand and a broadcast element
// of the first.
#if HWY_TARGET <= HWY_AVX3
constexpr int kRows = 12;  // the tile takes 24 of 32 registers
#else
constexpr int kRows = 6;  // the tile takes 12 of 16 registers
#endif
constexpr int kThird = kRows / 3;  // the rows of the smallest tile, for the last rows of a block and for generation
// ---- Packing

void copy_double(const StoredRows& x, int64_t n, int64_t dim, double scale, double* to, int64_t to_step) {
  copy_of<double, double>(x, n, dim, scale, to, to_step);
}
void copy_float(const StoredRows& x, int64_t n, int64_t dim, float scale, float* to, int64_t to_step) {
  if (x.storage == ElementType::kFloat) return copy_of<float, float>(x, n, dim, scale, to, to_step);
  if (x.storage == ElementType::kHalf) return copy_of<float, hwy::float16_t>(x, n, dim, scale, to, to_step);
  copy_of<float, hwy::bfloat16_t>(x, n, dim, scale, to, to_step);
}
void dots_double(const StoredRows& x, const StoredRows& y, int64_t n, int64_t dim, double* to, int64_t to_step) {
  dots_of<double, double>(x, y, n, dim, to, to_step);
}
void dots_float(const StoredRows& x, const StoredRows& y, int64_t n, int64_t dim, float* to, int64_t to_step) {
  if (x.storage == ElementType::kFloat) return dots_of<float, float>(x, y, n, dim, to, to_step);
  if (x.storage == ElementType::kHalf) return dots_of<float, hwy::float16_t>(x, y, n, dim, to, to_step);
  dots_of<float, hwy::bfloat16_t>(x, y, n, dim, to, to_step);
}
bool finite_double(const StoredRows& x, int64_t n, int64_t dim) { return finite_of<double, double>(x, n, dim); }
bool finite_float(const StoredRows& x, int64_t n, int64_t dim) {
  if (x.storage == ElementType::kFloat) return finite_of<float, float>(x, n, dim);
  if (x.storage == ElementType::kHalf) return finite_of<float, hwy::float16_t>(x, n, dim);
  return finite_of<float, hwy::bfloat16_t>(x, n, dim);
}
template <typename T>
void stack(const StoredRows& x, int64_t n, int64_t dim, T* to, int64_t to_step, int64_t row) {
  T* const first = to + row * to_step;
  if constexpr (std::is_same_v<T, double>) {
    copy_double(x, n, dim, 1, first, to_step);
  } else {
    copy_float(x, n, dim, 1, first, to_step);
  }
}
void transpose_double(const StoredRows& x, int64_t n, int64_t dim, double* panels, int64_t column) {
  transpose_of<double, double>(x, n, dim, panels, column);
}
void transpose_float(const StoredRows& x, int64_t n, int64_t dim, float* panels, int64_t column) {
  if (x.storage == ElementType::kFloat) return transpose_of<float, float>(x, n, dim, panels, column);
  if (x.storage == ElementType::kHalf) return transpose_of<float, hwy::float16_t>(x, n, dim, panels, column);
  transpose_of<float, hwy::bfloat16_t>(x, n, dim, panels, column);
}

// ---- Products

// sums[r][v] += the sum over j < n of a[r * a_row + j * a_column] * b[j * b_step + v * lanes]. The loops over the tile
// are fully unrolled, so that it stays in registers.
template <int kUsed, int kVectors, typename T>
HWY_INLINE void multiply(const T* HWY_RESTRICT a, int64_t a_row, int64_t a_column, const T* HWY_RESTRICT b,
                         int64_t b_step, int64_t n, Vec<T> (&sums)[kUsed][kVectors]) {
  constexpr int kPointers = (kUsed + 2) / 3;
  const Tag<T> d;
  const T* first[kPointers];  // three rows share a pointer, because registers for twelve would not suffice
  for (int g = 0; g < kPointers; ++g) first[g] = a + 3 * g * a_row;
  for (int64_t j = 0; j < n; ++j) {
    Vec<T> side[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) side[v] = hn::LoadU(d, b + v * kLanes<T>);
    b += b_step;
#pragma GCC unroll 12
    for (int r = 0; r < kUsed; ++r) {
      const Vec<T> one = hn::Set(d, first[r / 3][r % 3 * a_row]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::MulAdd(one, side[v], sums[r][v]);
    }
#pragma GCC unroll 4
    for (int g = 0; g < kPointers; ++g) first[g] += a_column;
  }
}

template <typename T, int kUsed, int kVectors>
HWY_INLINE void set_to_zero(Vec<T> (&sums)[kUsed][kVectors]) {
#pragma GCC unroll 12
  for (int r = 0; r < kUsed; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::Zero(Tag<T>());
  }
}

template <int kUsed, int kVectors, typename T>
HWY_INLINE void score_tile(const T* a, int64_t a_step, const T* panel, int64_t length, T* s, int64_t s_step) {
  const Tag<T> d;
  Vec<T> sums[kUsed][kVectors];
  set_to_zero<T>(sums);
  multiply(a, a_step, 1, panel, kPanel<T>, length, sums);
#pragma GCC unroll 12
  for (int r = 0; r < kUsed; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sums[r][v], d, s + r * s_step + v * kLanes<T>);
  }
}

template <int kUsed, typename T>
HWY_INLINE void score_rows(const T* a, int64_t a_step, const T* panels, int64_t length, Run run, T* s, int64_t s_step) {
  for (int64_t c = run.first; c < run.past;) {
    const int64_t within = c % kPanel<T>;
    const T* const panel = panels + (c - within) * length + within;
    if (within == 0 && c + kPanel<T> <= run.past) {
      score_tile<kUsed, 2>(a, a_step, panel, length, s + c, s_step);
      c += kPanel<T>;
    } else {
      score_tile<kUsed, 1>(a, a_step, panel, length, s + c, s_step);
      c += kLanes<T>;
    }
  }
}

template <typename T>
void scores(int64_t used, const T* a, int64_t a_step, const T* panels, int64_t length, Run run, T* s, int64_t s_step) {
  if (used > 2 * kThird) return score_rows<kRows>(a, a_step, panels, length, run, s, s_step);
  if (used > kThird) return score_rows<2 * kThird>(a, a_step, panels, length, run, s, s_step);
  score_rows<kThird>(a, a_step, panels, length, run, s, s_step);
}

// The products are added up by themselves and then added to what is there. A sum over all rows or keys of a long call,
// product by product, would be off by more the longer it is.
template <int kUsed, int kVectors, typename T>
HWY_INLINE void add_tile(const T* a, int64_t a_row, int64_t a_column, const T* b, int64_t b_step, int64_t n, T* c,
                         int64_t c_step, const T* keep, bool set) {
  const Tag<T> d;
  Vec<T> sums[kUsed][kVectors];
  set_to_zero<T>(sums);
  multiply(a, a_row, a_column, b, b_step, n, sums);
#pragma GCC unroll 12
  for (int r = 0; r < kUsed; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      T* const to = c + r * c_step + v * kLanes<T>;
      if (!set) {
        const auto there = hn::LoadU(d, to);
        sums[r][v] = keep == nullptr ? hn::Add(there, sums[r][v]) : hn::MulAdd(hn::Set(d, keep[r]), there, sums[r][v]);
      }
      hn::StoreU(sums[r][v], d, to);
    }
  }
}

template <int kUsed, typename T>
HWY_INLINE void add_rows(const T* a, int64_t a_row, int64_t a_column, const T* b, int64_t b_step, int64_t n, T* c,
                         int64_t c_step, int64_t dim, const T* keep, bool set) {
  int64_t i = 0;
  for (; i + kPanel<T> <= dim; i += kPanel<T>) {
    add_tile<kUsed, 2>(a, a_row, a_column, b + i, b_step, n, c + i, c_step, keep, set);
  }
  for (; i < dim; i += kLanes<T>) add_tile<kUsed, 1>(a, a_row, a_column, b + i, b_step, n, c + i, c_step, keep, set);
}

template <typename T>
void add_product(int64_t used, const T* a, int64_t a_row, int64_t a_column, const T* b, int64_t b_step, int64_t n, T* c,
                 int64_t c_step, int64_t dim, const T* keep, bool set) {
  if (used > 2 * kThird) return add_rows<kRows>(a, a_row, a_column, b, b_step, n, c, c_step, dim, keep, set);
  if (used > kThird) return add_rows<2 * kThird>(a, a_row, a_column, b, b_step, n, c, c_step, dim, keep, set);
  add_rows<kThird>(a, a_row, a_column, b, b_step, n, c, c_step, dim, keep, set);
}

// ---- Rows of scores

// All rows take as many steps as the one with the most hidden columns, because their lengths cannot be foreseen.
template <typename T>
void hide(int64_t used, T* s, int64_t s_step, const int64_t* from, const int64_t* past) {
  const Tag<T> d;
  const auto hidden = hn::Set(d, -std::numeric_limits<T>::infinity());
  int64_t most = 0;
  for (int64_t r = 0; r < used; ++r) most = std::max(most, past[r] - from[r]);
  for (int64_t r = 0; r < used; ++r) {
    T* const row = s + r * s_step + from[r];
    const int64_t count = past[r] - from[r];
    for (int64_t i = 0; i < most; i += kLanes<T>) {
      const auto left = static_cast<size_t>(std::clamp<int64_t>(count - i, 0, kLanes<T>));
      hn::BlendedStore(hidden, hn::FirstN(d, left), d, row + i);
    }
  }
}

template <typename T>
void hide_bits(int64_t used, T* s, int64_t s_step, const Run* runs, int64_t count, const uint64_t* shown,
               int64_t shown_step) {
  const Tag<T> d;
  const auto hidden = hn::Set(d, -std::numeric_limits<T>::infinity());
  for (int64_t r = 0; r < used; ++r, s += s_step, shown += shown_step) {
    for (const Run* run = runs; run != runs + count; ++run) {
      for (int64_t c = run->first; c < run->past; c += kLanes<T>) {
        const uint64_t bits = ~(shown[c / 64] >> (c % 64));
        hn::BlendedStore(hidden, hn::LoadMaskBits(d, reinterpret_cast<const uint8_t*>(&bits)), d, s + c);
      }
    }
  }
}

// The larger of x and `most`. x86 takes the second operand if one is NaN, so NaN among x are left out.
template <typename V>
HWY_INLINE V larger(V x, V most) {
  return hn::Max(x, most);
}

// The largest element of the runs of x. It uses four vectors, because the comparisons of a single one would wait for
// each other.
template <typename T>
HWY_INLINE T most_of(const T* x, const Run* runs, int64_t count) {
  const Tag<T> d;
  auto a = hn::Set(d, -std::numeric_limits<T>::infinity()), b = a, c = a, e = a;
  for (const Run* run = runs; run != runs + count; ++run) {
    int64_t i = run->first;
    for (; i + 4 * kLanes<T> <= run->past; i += 4 * kLanes<T>) {
      a = larger(hn::LoadU(d, x + i), a);
      b = larger(hn::LoadU(d, x + i + kLanes<T>), b);
      c = larger(hn::LoadU(d, x + i + 2 * kLanes<T>), c);
      e = larger(hn::LoadU(d, x + i + 3 * kLanes<T>), e);
    }
    for (; i < run->past; i += kLanes<T>) a = larger(hn::LoadU(d, x + i), a);
  }
  return hn::GetLane(hn::MaxOfLanes(d, larger(larger(a, b), larger(c, e))));
}

// e, or with dropout e times the factor of its pair.
template <bool kDrops, typename T>
HWY_INLINE Vec<T> dropped(Vec<T> e, const T* factors) {
  if constexpr (!kDrops) return e;
  return hn::Mul(e, hn::LoadU(Tag<T>(), factors));
}

// scale * x - shift, where the product is rounded like the maximum of such products that is the shift. So it is 0 for
// the largest product and positive for none. A fused operation would not round the product, and the rest that the
// maximum lacks exceeds every exponent from scores of 2^31 on. This file is compiled without -ffp-contract=fast, with
// which the compiler fuses the two.
template <typename T>
HWY_INLINE Vec<T> exponent_of(Vec<T> scale, Vec<T> x, Vec<T> shift) {
  return hn::Sub(hn::Mul(scale, x), shift);
}

// Replaces the elements x of the runs by exp(scale * x - shift), of which it returns the sum, and with dropout then by
// their products with `factors`. It handles two vectors at a time, because an exponential is a chain of operations that
// wait for each other.
template <bool kDrops, typename T>
HWY_INLINE T exponentials(T* x, const Run* runs, int64_t count, T scale, const T* factors, T shift) {
  const Tag<T> d;
  const auto times = hn::Set(d, scale), s = hn::Set(d, shift);
  auto sum = hn::Zero(d), sum2 = sum;
  for (const Run* run = runs; run != runs + count; ++run) {
    int64_t i = run->first;
    for (; i + 2 * kLanes<T> <= run->past; i += 2 * kLanes<T>) {
      const auto e = exponential<Exponents::kNoOverflow>(d, exponent_of<T>(times, hn::LoadU(d, x + i), s));
      const auto f = exponential<Exponents::kNoOverflow>(d, exponent_of<T>(times, hn::LoadU(d, x + i + kLanes<T>), s));
      hn::StoreU(dropped<kDrops>(e, factors + i), d, x + i);
      hn::StoreU(dropped<kDrops>(f, factors + i + kLanes<T>), d, x + i + kLanes<T>);
      sum = hn::Add(sum, e);
      sum2 = hn::Add(sum2, f);
    }
    for (; i < run->past; i += kLanes<T>) {
      const auto e = exponential<Exponents::kNoOverflow>(d, exponent_of<T>(times, hn::LoadU(d, x + i), s));
      hn::StoreU(dropped<kDrops>(e, factors + i), d, x + i);
      sum = hn::Add(sum, e);
    }
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(sum, sum2)));
}

template <typename T>
void softmax(int64_t used, T* s, int64_t s_step, const Run* runs, int64_t count, T scale, const T* factors, T* maximum,
             T* sum, T* keep) {
  const Tag<T> d;
  constexpr T kInfinity = std::numeric_limits<T>::infinity();
  HWY_ALIGN T most[kMostTileRows], before[kMostTileRows], factor[kMostTileRows];
  for (int64_t r = 0; r < used; ++r) {
    before[r] = maximum[r];
    most[r] = std::max(maximum[r], scale * most_of(s + r * s_step, runs, count));
  }
  // Few rows have a new maximum, but an exponential of all of them costs less than a branch for each.
  const auto least = hn::Set(d, -kInfinity), one = hn::Set(d, T{1});
  for (int64_t r = used; r % kLanes<T> != 0; ++r) most[r] = before[r] = 0;
  for (int64_t r = 0; r < used; r += kLanes<T>) {
    const auto now = hn::Load(d, most + r), then = hn::Load(d, before + r);
    const auto shift = hn::IfThenZeroElse(hn::Eq(now, least), now);
    const auto same = hn::And(hn::Eq(now, then), hn::Ne(now, least));
    hn::Store(hn::IfThenElse(same, one, exponential<Exponents::kNoOverflow>(d, hn::Sub(then, shift))), d, factor + r);
  }
  for (int64_t r = 0; r < used; ++r) {
    const T shift = most[r] == -kInfinity ? 0 : most[r];
    T* const row = s + r * s_step;
    keep[r] = factor[r];
    sum[r] = sum[r] * keep[r] + (factors == nullptr
                                     ? exponentials<false>(row, runs, count, scale, factors, shift)
                                     : exponentials<true>(row, runs, count, scale, factors + r * s_step, shift));
    maximum[r] = most[r];
  }
}

template <bool kDrops, bool kCaps, typename T>
HWY_INLINE void gradient_step(T* p, T* ds, const T* factors, Vec<T> scale, Vec<T> per_cap, Vec<T> lse, Vec<T> delta) {
  const Tag<T> d;
  const auto score = hn::LoadU(d, p);
  auto e = exponential(d, exponent_of<T>(scale, score, lse));
  hn::StoreU(dropped<kDrops>(e, factors), d, p);
  if constexpr (kCaps) {
    const auto tanh = hn::Mul(per_cap, score), slope = hn::NegMulAdd(tanh, tanh, hn::Set(d, T{1}));
    e = hn::Mul(e, hn::Max(slope, hn::Zero(d)));
  }
  hn::StoreU(hn::Mul(e, hn::Sub(dropped<kDrops>(hn::LoadU(d, ds), factors), delta)), d, ds);
}

template <bool kDrops, bool kCaps, typename T>
HWY_INLINE void gradient_of(int64_t used, T* p, T* ds, int64_t step, const Run* runs, int64_t count, T scale, T per_cap,
                            const T* factors, const T* lse, const T* delta) {
  const Tag<T> d;
  const auto times = hn::Set(d, scale), inner = hn::Set(d, scale * per_cap);
  for (int64_t r = 0; r < used; ++r) {
    const auto l = hn::Set(d, lse[r]), less = hn::Set(d, delta[r]);
    const auto at = [&](int64_t i) HWY_ATTR {
      gradient_step<kDrops, kCaps>(p + r * step + i, ds + r * step + i, kDrops ? factors + r * step + i : nullptr,
                                   times, inner, l, less);
    };
    for (const Run* run = runs; run != runs + count; ++run) {
      int64_t i = run->first;
      for (; i + 2 * kLanes<T> <= run->past; i += 2 * kLanes<T>) at(i), at(i + kLanes<T>);
      for (; i < run->past; i += kLanes<T>) at(i);
    }
  }
}

template <typename T>
void gradient(int64_t used, T* p, T* ds, int64_t step, const Run* runs, int64_t count, T scale, T per_cap,
              const T* factors, const T* lse, const T* delta) {
  const auto of = [&](auto drops, auto caps) {
    gradient_of<drops.value, caps.value>(used, p, ds, step, runs, count, scale, per_cap, factors, lse, delta);
  };
  using No = std::false_type;
  using Yes = std::true_type;
  if (per_cap > 0) return factors == nullptr ? of(No(), Yes()) : of(Yes(), Yes());
  factors == nullptr ? of(No(), No()) : of(Yes(), No());
}

template <bool kAdds, typename T>
HWY_INLINE void put_row(const T* from, int64_t dim, T factor, T* to) {
  const Tag<T> d;
  const auto f = hn::Set(d, factor);
  int64_t i = 0;
  for (; i + kLanes<T> <= dim; i += kLanes<T>) {
    const auto x = hn::LoadU(d, from + i);
    hn::StoreU(kAdds ? hn::MulAdd(f, x, hn::LoadU(d, to + i)) : hn::Mul(f, x), d, to + i);
  }
  for (; i < dim; ++i) to[i] = factor * from[i] + (kAdds ? to[i] : T{0});
}

// The bits of bf16 that are nearest to x, of two the even ones. NaN stay NaN.
HWY_INLINE hn::Vec<hn::Rebind<uint16_t, Tag<float>>> nearest_bf16(Vec<float> x) {
  const hn::Rebind<uint32_t, Tag<float>> wide;
  const hn::Rebind<uint16_t, Tag<float>> narrow;
  const auto bits = hn::BitCast(wide, x), odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(wide, 1u));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(wide, 0x7FFFu)));
  const auto chosen =
      hn::IfThenElse(hn::RebindMask(wide, hn::IsNaN(x)), hn::Or(bits, hn::Set(wide, 0x400000u)), rounded);
  const hn::Rebind<int32_t, Tag<float>> positive;  // the upper half of the bits is
  return hn::DemoteTo(narrow, hn::BitCast(positive, hn::ShiftRight<16>(chosen)));
}

void round_row(const float* from, int64_t dim, float factor, uint16_t* to) {
  const Tag<float> d;
  const hn::Rebind<uint16_t, Tag<float>> narrow;
  const auto f = hn::Set(d, factor);
  int64_t i = 0;
  for (; i + kLanes<float> <= dim; i += kLanes<float>) {
    hn::StoreU(nearest_bf16(hn::Mul(f, hn::LoadU(d, from + i))), narrow, to + i);
  }
  if (i == dim) return;
  uint16_t rest[kLanes<float>];
  hn::StoreU(nearest_bf16(hn::Mul(f, widened_rest<float>(from + i, dim - i))), narrow, rest);
  std::memcpy(to + i, rest, static_cast<size_t>(dim - i) * sizeof(uint16_t));
}

template <typename T>
void put(const T* from, int64_t dim, T factor, void* to, Put how) {
  if constexpr (std::is_same_v<T, float>) {
    if (how == Put::kRound) return round_row(from, dim, factor, static_cast<uint16_t*>(to));
  }
  if (how == Put::kAdd) return put_row<true>(from, dim, factor, static_cast<T*>(to));
  put_row<false>(from, dim, factor, static_cast<T*>(to));
}

template <typename T>
constexpr TileMath<T> math_of(decltype(TileMath<T>::copy) copy, decltype(TileMath<T>::transpose) transpose,
                              decltype(TileMath<T>::dots) dots, decltype(TileMath<T>::finite) finite) {
  return {.rows = kRows,
          .panel = kPanel<T>,
          .lanes = kLanes<T>,
          .together = 1,
          .depth = 1,
          .held = 48,
          .copy = copy,
          .transpose = transpose,
          .stack = stack<T>,
          .dots = dots,
          .finite = finite,
          .scores = scores<T>,
          .add_product = add_product<T>,
          .cap = cap<T>,
          .hide = hide<T>,
          .hide_bits = hide_bits<T>,
          .softmax = softmax<T>,
          .gradient = gradient<T>,
          .put = put<T>,
          .narrow = nullptr,
          .zip = nullptr};
}
constexpr TileMath<float> kFloat = math_of<float>(copy_float, transpose_float, dots_float, finite_float);
constexpr TileMath<double> kDouble = math_of<double>(copy_double, transpose_double, dots_double, finite_double);

}  // namespace HWY_NAMESPACE
}  // namespace tile_math_versions
}  // namespace annulus
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace annulus {

template <>
const TileMath<float>& tile_math<float>() {
  static const TileMath<float>& chosen = ANNULUS_VERSION(tile_math_versions, kFloat);
  return chosen;
}
template <>
const TileMath<double>& tile_math<double>() {
  static const TileMath<double>& chosen = ANNULUS_VERSION(tile_math_versions, kDouble);
  return chosen;
}

}  // namespace annulus
#endif  // HWY_ONCE
