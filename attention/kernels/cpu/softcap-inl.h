// Soft caps of scores: c tanh(score / c). Vector code of tile_math.cc, which includes this header once for each
// instruction set (common/simd/versions.h), outside HWY_BEFORE_NAMESPACE.

#if defined(ANNULUS_ATTENTION_CPU_FLASH_SOFTCAP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANNULUS_ATTENTION_CPU_FLASH_SOFTCAP_INL_H_
#undef ANNULUS_ATTENTION_CPU_FLASH_SOFTCAP_INL_H_
#else
#define ANNULUS_ATTENTION_CPU_FLASH_SOFTCAP_INL_H_
#endif

#include <cmath>
#include <limits>
#include <type_traits>

#include "attention/kernels/cpu/packing-inl.h"
#include "attention/kernels/cpu/tile_math.h"
#include "common/simd/exponential-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace annulus {
namespace tile_math_versions {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using simd::HWY_NAMESPACE::hyperbolic_tangent;

// The constants of a soft cap c of the scores scale * x.
template <typename T>
struct SoftCap {
  // c tanh(u) for |u| <= 1/2 is x (terms[0] + terms[1] x^2 + ...), the odd minimax polynomial of degree 9 in u = scale
  // / c x, whose relative error is 1.5e-8: less than the rounding of fp32. Scores far below the cap, which most are,
  // thus cost no exponential. In fp64 it would take twice as many terms.
  static constexpr bool kShort = std::is_same_v<T, float>;
  static constexpr double kTerms[] = {1, -0.333331438926, 0.1332587886, -0.0530454863507, 0.0172414727718};
  T cap, inner, most;  // c, scale / c, and the largest x^2 of a short sum; -1 if there is none
  T terms[5];

  SoftCap(T scale, T softcap) : cap(softcap), inner(scale / softcap), most(T{0.25} / (inner * inner)) {
    double factor = scale;
    for (int i = 0; i < 5; ++i, factor *= static_cast<double>(inner) * static_cast<double>(inner)) {
      terms[i] = static_cast<T>(kTerms[i] * factor);
      if (!std::isnormal(terms[i])) most = -1;  // too large or small for T
    }
    if (!std::isfinite(most)) most = std::numeric_limits<T>::max();
    if (!std::isfinite(inner)) inner = std::copysign(std::numeric_limits<T>::max(), inner);
  }
};

// Caps kVectors vectors at x.
template <int kVectors, typename T>
HWY_INLINE void cap_vectors(T* x, const SoftCap<T>& c) {
  const Tag<T> d;
  Vec<T> v[kVectors];
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) v[i] = hn::LoadU(d, x + i * kLanes<T>);
  if constexpr (SoftCap<T>::kShort) {
    Vec<T> square[kVectors];
    auto most = hn::Zero(d);
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) square[i] = hn::Mul(v[i], v[i]), most = hn::Max(square[i], most);
    if (hn::AllTrue(d, hn::Le(most, hn::Set(d, c.most)))) {
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) {
        auto sum = hn::Set(d, c.terms[4]);
#pragma GCC unroll 4
        for (int t = 3; t >= 0; --t) sum = hn::MulAdd(sum, square[i], hn::Set(d, c.terms[t]));
        hn::StoreU(hn::Mul(v[i], sum), d, x + i * kLanes<T>);
      }
      return;
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) {
    const auto tanh = hyperbolic_tangent(d, hn::Mul(hn::Set(d, c.inner), v[i]));
    hn::StoreU(hn::Mul(hn::Set(d, c.cap), tanh), d, x + i * kLanes<T>);
  }
}

template <typename T>
void cap(int64_t used, T* s, int64_t s_step, const Run* runs, int64_t count, T scale, T softcap) {
  const SoftCap<T> c(scale, softcap);
  for (int64_t r = 0; r < used; ++r) {
    T* const row = s + r * s_step;
    for (const Run* run = runs; run != runs + count; ++run) {
      int64_t i = run->first;
      for (; i + 4 * kLanes<T> <= run->past; i += 4 * kLanes<T>) cap_vectors<4>(row + i, c);
      for (; i < run->past; i += kLanes<T>) cap_vectors<1>(row + i, c);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace tile_math_versions
}  // namespace annulus
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
