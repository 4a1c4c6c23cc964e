// The exponential and the hyperbolic tangent of fp32 and fp64 vectors, for attention
// (attention/kernels/cpu/tile_math.cc) and the model's operators (runtime/model/fused_loops.cc). Files that include
// this header are compiled once for each instruction set (versions.h). The header opens and closes Highway's namespaces
// itself, so include it outside HWY_BEFORE_NAMESPACE.

#if defined(ANNULUS_SIMD_EXPONENTIAL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANNULUS_SIMD_EXPONENTIAL_INL_H_
#undef ANNULUS_SIMD_EXPONENTIAL_INL_H_
#else
#define ANNULUS_SIMD_EXPONENTIAL_INL_H_
#endif

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace annulus {
namespace simd {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Which x the caller passes to exponential(). kNoOverflow saves operations.
enum class Exponents { kAny, kNoOverflow };

// times_power returns p * 2^n, which is e^x with the relative error of p, but 0 for x < least, infinity where e^x
// overflows (at the earliest for x > most), and NaN for NaN. The low bits of `shifted` contain n. limited() clamps x
// before n and p are computed.
#if HWY_TARGET <= HWY_AVX3
// vscalef, which Debian's Highway does not expose, multiplies by 2^n for any n. x is clamped because for a large x the
// reduced argument r, a difference of large numbers, would be meaningless. Min returns its second operand if that is
// NaN.
template <Exponents kWhich, class D, class V = hn::Vec<D>>
HWY_INLINE V limited(D d, V x, hn::TFromD<D> most) {
  return kWhich == Exponents::kNoOverflow ? x : hn::Min(hn::Set(d, most + 1), x);
}
template <Exponents kWhich>
HWY_INLINE hn::Vec512<float> times_power(hn::Full512<float>, hn::Vec512<float> p, hn::Vec512<float> n,
                                         hn::Vec512<float>, hn::Vec512<float> x, float least, float) {
  const __mmask16 counts = _mm512_cmp_ps_mask(x.raw, _mm512_set1_ps(least), _CMP_NLT_UQ);
  return hn::Vec512<float>{_mm512_maskz_scalef_ps(counts, p.raw, n.raw)};
}
template <Exponents kWhich>
HWY_INLINE hn::Vec512<double> times_power(hn::Full512<double>, hn::Vec512<double> p, hn::Vec512<double> n,
                                          hn::Vec512<double>, hn::Vec512<double> x, double least, double) {
  const __mmask8 counts = _mm512_cmp_pd_mask(x.raw, _mm512_set1_pd(least), _CMP_NLT_UQ);
  return hn::Vec512<double>{_mm512_maskz_scalef_pd(counts, p.raw, n.raw)};
}
#else
template <Exponents kWhich, class D, class V = hn::Vec<D>>
HWY_INLINE V limited(D, V x, hn::TFromD<D>) {
  return x;
}
template <Exponents kWhich, class D, class V = hn::Vec<D>>
HWY_INLINE V times_power(D d, V p, V, V shifted, V x, hn::TFromD<D> least, hn::TFromD<D> most) {
  // 2^n is built from its exponent bits.
  constexpr bool kWide = sizeof(hn::TFromD<D>) == 8;
  constexpr int kMantissa = kWide ? 52 : 23, kBias = kWide ? 1023 : 127;
  const hn::RebindToSigned<D> di;
  const auto power = hn::ShiftLeft<kMantissa>(hn::Add(hn::BitCast(di, shifted), hn::Set(di, kBias)));
  p = hn::Mul(p, hn::BitCast(d, power));
  if (kWhich == Exponents::kAny) p = hn::IfThenElse(hn::Gt(x, hn::Set(d, most)), hn::Inf(d), p);
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, least)), p);
}
#endif

// x = n ln 2 + r with a whole number n and |r| <= ln 2 / 2. The low bits of `shifted` contain n.
template <class V>
struct Reduced {
  V n, shifted, r;
};

template <class D, class V = hn::Vec<D>, hwy::EnableIf<hwy::IsSame<hn::TFromD<D>, float>()>* = nullptr>
HWY_INLINE Reduced<V> reduced(D d, V x) {
  const V round = hn::Set(d, 12582912.0f);  // 1.5 x 2^23: adding it rounds to an integer in the low bits
  const V shifted = hn::MulAdd(x, hn::Set(d, 1.44269504088896341f), round);
  const V n = hn::Sub(shifted, round);
  return {n, shifted, hn::MulAdd(n, hn::Set(d, 2.12194440e-4f), hn::NegMulAdd(n, hn::Set(d, 0.693359375f), x))};
}
template <class D, class V = hn::Vec<D>, hwy::EnableIf<hwy::IsSame<hn::TFromD<D>, double>()>* = nullptr>
HWY_INLINE Reduced<V> reduced(D d, V x) {
  const V round = hn::Set(d, 6755399441055744.0);  // 1.5 x 2^52
  const V shifted = hn::MulAdd(x, hn::Set(d, 1.4426950408889634), round);
  const V n = hn::Sub(shifted, round);
  // ln 2 is split into two parts (Cody and Waite); the first is so short that its product with n is exact.
  return {n, shifted,
          hn::NegMulAdd(n, hn::Set(d, 1.9082149292705877e-10), hn::NegMulAdd(n, hn::Set(d, 0.6931471803691238), x))};
}

// (e^r - 1) / r for |r| <= ln 2 / 2. In fp32 it is 1 + r q(r), where q is the minimax polynomial of degree 4 (relative
// error of e^r 4e-9 with fp32 coefficients), in fp64 the Taylor polynomial of degree 12, whose remainder is below
// 1e-17.
template <class D, class V = hn::Vec<D>, hwy::EnableIf<hwy::IsSame<hn::TFromD<D>, float>()>* = nullptr>
HWY_INLINE V exponential_slope(D d, V r) {
  V p = hn::MulAdd(r, hn::Set(d, 1.3814540580e-3f), hn::Set(d, 8.3687454462e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 4.1668388993e-2f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.6666521132e-1f));
  p = hn::MulAdd(p, r, hn::Set(d, 4.9999994040e-1f));
  return hn::MulAdd(p, r, hn::Set(d, 1.0f));
}
template <class D, class V = hn::Vec<D>, hwy::EnableIf<hwy::IsSame<hn::TFromD<D>, double>()>* = nullptr>
HWY_INLINE V exponential_slope(D d, V r) {
  V p = hn::MulAdd(r, hn::Set(d, 1.0 / 6227020800), hn::Set(d, 1.0 / 479001600));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0 / 39916800));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0 / 3628800));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0 / 362880));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0 / 40320));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0 / 5040));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0 / 720));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0 / 120));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0 / 24));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0 / 6));
  p = hn::MulAdd(p, r, hn::Set(d, 0.5));
  return hn::MulAdd(p, r, hn::Set(d, 1.0));
}

// Computes e^x = 2^n e^r with an error of at most 2 ulp. The result is 0 for x < -87, for fp64 x < -708 (where e^x is
// close to the smallest normal number), infinity for x > 88, for fp64 709 (with AVX-512 only where e^x overflows), and
// NaN for NaN. With kNoOverflow, x must be at most 88, or 709, or NaN.
template <Exponents kWhich = Exponents::kAny, class D, class V = hn::Vec<D>>
HWY_INLINE V exponential(D d, V x) {
  using T = hn::TFromD<D>;
  constexpr bool kWide = sizeof(T) == 8;
  constexpr T kLeast = kWide ? -708 : -87, kMost = kWide ? 709 : 88;
  x = limited<kWhich>(d, x, kMost);
  const Reduced<V> of = reduced(d, x);
  const V p = hn::MulAdd(exponential_slope(d, of.r), of.r, hn::Set(d, T{1}));
  return times_power<kWhich>(d, p, of.n, of.shifted, x, kLeast, kMost);
}

// Computes tanh x = e / (e + 2) with e = e^2x - 1 = 2^n (e^r - 1) + (2^n - 1), where r is that of 2x. Its relative
// error is at most 8 unit roundoffs (2^-21, for fp64 2^-50), for the smallest x, too, because n = 0 and r = 2x there: e
// has at most 4, of which a negative e doubles at most so many as it has lost by cancellation, and the rest rounds
// thrice. Never beyond -1 and 1, which it is from |x| = 10 (fp64: 20) on; NaN for NaN.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V hyperbolic_tangent(D d, V x) {
  using T = hn::TFromD<D>;
  constexpr bool kWide = sizeof(T) == 8;
  constexpr int kMantissa = kWide ? 52 : 23, kBias = kWide ? 1023 : 127;
  const V most = hn::Set(d, kWide ? T{40} : T{20});
  // Min and Max return their second operands if these are NaN.
  const Reduced<V> of = reduced(d, hn::Max(hn::Neg(most), hn::Min(most, hn::Add(x, x))));
  const hn::RebindToSigned<D> di;
  const V power = hn::BitCast(d, hn::ShiftLeft<kMantissa>(hn::Add(hn::BitCast(di, of.shifted), hn::Set(di, kBias))));
  const V e = hn::MulAdd(power, hn::Mul(exponential_slope(d, of.r), of.r), hn::Sub(power, hn::Set(d, T{1})));
  return hn::Div(e, hn::Add(e, hn::Set(d, T{2})));
}

// load_some loads the first n < Lanes(d) elements at x and fills the other lanes with `rest`; store_some stores the
// first n lanes at x.
template <class D>
HWY_INLINE hn::Vec<D> load_some(D d, const float* x, size_t n, float rest) {
  HWY_ALIGN float lanes[HWY_MAX_BYTES / sizeof(float)];
  hn::Store(hn::Set(d, rest), d, lanes);
  for (size_t i = 0; i < n; ++i) lanes[i] = x[i];
  return hn::Load(d, lanes);
}
template <class D>
HWY_INLINE void store_some(hn::Vec<D> v, D d, float* x, size_t n) {
  HWY_ALIGN float lanes[HWY_MAX_BYTES / sizeof(float)];
  hn::Store(v, d, lanes);
  for (size_t i = 0; i < n; ++i) x[i] = lanes[i];
}

}  // namespace HWY_NAMESPACE
}  // namespace simd
}  // namespace annulus
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
