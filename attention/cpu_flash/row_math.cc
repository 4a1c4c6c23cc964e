// See row_math.h.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention/cpu_flash/row_math.cc"
// versions.h comes first.
// clang-format off
#include "simd/versions.h"
#include "simd/exponential-inl.h"
// clang-format on

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/cpu_flash/row_math.h"

#ifndef ANNULUS_ROW_MATH_PASSES_
#define ANNULUS_ROW_MATH_PASSES_
namespace annulus::row_math {
struct Passes {
  float (*max)(const float*, int64_t, float);
  float (*exp)(float*, int64_t, float);
  void (*gradient)(float*, float*, int64_t, float, float);
};
}  // namespace annulus::row_math
#endif

HWY_BEFORE_NAMESPACE();
namespace annulus {
namespace row_math {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using simd::HWY_NAMESPACE::exponential;
using simd::HWY_NAMESPACE::load_some;
using simd::HWY_NAMESPACE::store_some;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const hn::ScalableTag<float> d;

// The operand that may be NaN comes where a comparison with it gives the other.
HWY_INLINE hn::Vec<decltype(d)> larger(hn::Vec<decltype(d)> x, hn::Vec<decltype(d)> most) {
  return hn::IfThenElse(hn::Gt(x, most), x, most);
}

// In four vectors: the comparisons of one would wait for each other.
float max_of(const float* x, int64_t n, float floor) {
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  auto a = hn::Set(d, floor), b = a, c = a, e = a;
  int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    a = larger(hn::LoadU(d, x + i), a);
    b = larger(hn::LoadU(d, x + i + lanes), b);
    c = larger(hn::LoadU(d, x + i + 2 * lanes), c);
    e = larger(hn::LoadU(d, x + i + 3 * lanes), e);
  }
  for (; i + lanes <= n; i += lanes) a = larger(hn::LoadU(d, x + i), a);
  a = larger(larger(a, b), larger(c, e));
  float most = hn::GetLane(hn::MaxOfLanes(d, a));
  for (; i < n; ++i) most = x[i] > most ? x[i] : most;
  return most;
}

float exp_of(float* x, int64_t n, float shift) {
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto s = hn::Set(d, shift);
  auto sum = hn::Zero(d);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto e = exponential(d, hn::Sub(hn::LoadU(d, x + i), s));
    sum = hn::Add(sum, e);
    hn::StoreU(e, d, x + i);
  }
  if (i < n) {
    const auto rest = static_cast<size_t>(n - i);
    const auto e = exponential(d, hn::Sub(load_some(d, x + i, rest, -kInfinity), s));
    sum = hn::Add(sum, e);
    store_some(e, d, x + i, rest);
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

void gradient_of(float* p, float* ds, int64_t n, float lse, float delta) {
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto l = hn::Set(d, lse), less = hn::Set(d, delta);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto e = exponential(d, hn::Sub(hn::LoadU(d, p + i), l));
    hn::StoreU(e, d, p + i);
    hn::StoreU(hn::Mul(e, hn::Sub(hn::LoadU(d, ds + i), less)), d, ds + i);
  }
  if (i < n) {
    const auto rest = static_cast<size_t>(n - i);
    const auto e = exponential(d, hn::Sub(load_some(d, p + i, rest, -kInfinity), l));
    store_some(e, d, p + i, rest);
    store_some(hn::Mul(e, hn::Sub(load_some(d, ds + i, rest, 0), less)), d, ds + i, rest);
  }
}

constexpr Passes kPasses = {max_of, exp_of, gradient_of};

}  // namespace HWY_NAMESPACE
}  // namespace row_math
}  // namespace annulus
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace annulus {
namespace {

const row_math::Passes& passes() {
  static const row_math::Passes& chosen = ANNULUS_VERSION(row_math, kPasses);
  return chosen;
}

}  // namespace

float row_max(const float* x, int64_t n, float floor) { return passes().max(x, n, floor); }
float row_exp(float* x, int64_t n, float shift) { return passes().exp(x, n, shift); }
void row_gradient(float* p, float* ds, int64_t n, float lse, float delta) { passes().gradient(p, ds, n, lse, delta); }

// fp64 is for checks, not for speed.
double row_max(const double* x, int64_t n, double floor) {
  for (int64_t i = 0; i < n; ++i) floor = x[i] > floor ? x[i] : floor;
  return floor;
}
double row_exp(double* x, int64_t n, double shift) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i] = std::exp(x[i] - shift);
  return sum;
}
void row_gradient(double* p, double* ds, int64_t n, double lse, double delta) {
  for (int64_t i = 0; i < n; ++i) {
    p[i] = std::exp(p[i] - lse);
    ds[i] = p[i] * (ds[i] - delta);
  }
}

}  // namespace annulus
#endif  // HWY_ONCE
