// Weighted sums in vectors, compiled once for each instruction set; see weighted_sum.h.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention/tiles/weighted_sum.cc"
#include "common/simd/versions.h"

#include "attention/tiles/weighted_sum.h"

#ifndef ANNULUS_WEIGHTED_SUM_TABLE_
#define ANNULUS_WEIGHTED_SUM_TABLE_
namespace annulus::weighted_sums {

struct Sums {
  void (*floats)(const float* const* rows, const float* weights, int64_t count, int64_t dim, float* out);
  void (*doubles)(const double* const* rows, const double* weights, int64_t count, int64_t dim, double* out);
};

}  // namespace annulus::weighted_sums
#endif

HWY_BEFORE_NAMESPACE();
namespace annulus {
namespace weighted_sums {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <typename T>
void sum(const T* const* rows, const T* weights, int64_t count, int64_t dim, T* out) {
  const hn::ScalableTag<T> v;
  const hn::CappedTag<T, 1> one;
  const auto lanes = static_cast<int64_t>(hn::Lanes(v));
  // The sum of the elements from d on that fit into a vector of this tag.
  const auto add_up = [&](auto tag, int64_t d) {
    auto total = hn::Mul(hn::Set(tag, weights[0]), hn::LoadU(tag, rows[0] + d));
    for (int64_t s = 1; s < count; ++s) {
      total = hn::MulAdd(hn::Set(tag, weights[s]), hn::LoadU(tag, rows[s] + d), total);
    }
    hn::StoreU(total, tag, out + d);
  };
  int64_t d = 0;
  for (; d + lanes <= dim; d += lanes) add_up(v, d);
  for (; d < dim; ++d) add_up(one, d);
}
constexpr Sums kSums = {sum<float>, sum<double>};

}  // namespace HWY_NAMESPACE
}  // namespace weighted_sums
}  // namespace annulus
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace annulus {
namespace {

const weighted_sums::Sums& sums() {
  static const weighted_sums::Sums& chosen = ANNULUS_VERSION(weighted_sums, kSums);
  return chosen;
}

}  // namespace

template <>
void weighted_sum(const float* const* rows, const float* weights, int64_t count, int64_t dim, float* out) {
  sums().floats(rows, weights, count, dim, out);
}
template <>
void weighted_sum(const double* const* rows, const double* weights, int64_t count, int64_t dim, double* out) {
  sums().doubles(rows, weights, count, dim, out);
}

}  // namespace annulus
#endif
