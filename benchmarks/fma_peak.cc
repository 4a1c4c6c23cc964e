// Implements fma_peak.h, once for each instruction set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "benchmarks/fma_peak.cc"
#include "common/simd/versions.h"

#include <algorithm>
#include <cstdint>

#include "benchmarks/fma_peak.h"
#include "benchmarks/measure.h"

#ifndef ANNULUS_FMA_PEAKS_
#define ANNULUS_FMA_PEAKS_
namespace annulus::fma_peak_versions {
struct Peaks {
  double (*narrow)();
  double (*wide)();
};
}  // namespace annulus::fma_peak_versions
#endif

HWY_BEFORE_NAMESPACE();
namespace annulus {
namespace fma_peak_versions {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Adds up ten independent sums: enough for a core that starts two multiply-adds a cycle, each of which takes at most
// five cycles.
template <typename T>
double flops() {
  const hn::ScalableTag<T> d;
  constexpr int64_t kSteps = 40000;
  const auto x = hn::Set(d, T(0.999)), y = hn::Set(d, T(0.5));
  double least = 1e9;
  volatile T result = 0;  // keeps the compiler from removing the sums
  for (int turn = 0; turn < 8; ++turn) {
    // The sums begin with different values; the compiler would compute equal ones only once.
    auto a = hn::Set(d, T(1)), b = hn::Set(d, T(2)), c = hn::Set(d, T(3)), e = hn::Set(d, T(4)), f = hn::Set(d, T(5));
    auto g = hn::Set(d, T(6)), h = hn::Set(d, T(7)), i = hn::Set(d, T(8)), j = hn::Set(d, T(9)), k = hn::Set(d, T(10));
    const double begin = thread_cpu_seconds();
    for (int64_t step = 0; step < kSteps; ++step) {
      a = hn::MulAdd(a, x, y), b = hn::MulAdd(b, x, y), c = hn::MulAdd(c, x, y), e = hn::MulAdd(e, x, y);
      f = hn::MulAdd(f, x, y), g = hn::MulAdd(g, x, y), h = hn::MulAdd(h, x, y), i = hn::MulAdd(i, x, y);
      j = hn::MulAdd(j, x, y), k = hn::MulAdd(k, x, y);
    }
    least = std::min(least, thread_cpu_seconds() - begin);
    const auto sum = hn::Add(hn::Add(hn::Add(a, b), hn::Add(c, e)), hn::Add(hn::Add(f, g), hn::Add(h, i)));
    result = result + hn::GetLane(hn::Add(sum, hn::Add(j, k)));
  }
  return 2.0 * 10 * static_cast<double>(hn::Lanes(d)) * kSteps / least;
}

constexpr Peaks kPeaks = {flops<float>, flops<double>};

}  // namespace HWY_NAMESPACE
}  // namespace fma_peak_versions
}  // namespace annulus
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace annulus {

double fma_flops(bool wide) {
  static const fma_peak_versions::Peaks& chosen = ANNULUS_VERSION(fma_peak_versions, kPeaks);
  return wide ? chosen.wide() : chosen.narrow();
}

}  // namespace annulus
#endif  // HWY_ONCE
