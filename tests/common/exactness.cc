// See exactness.h.
#include "tests/common/exactness.h"

#include <ATen/TensorOperators.h>

#include <algorithm>
#include <limits>
#include <map>
#include <mutex>
#include <sstream>
#include <string>

#include "attention/oracle/rounding.h"

namespace annulus::testing {
namespace {

// Remembers the largest share of an allowed error for each test, also where ranks are threads.
void record(double share) {
  if (::testing::UnitTest::GetInstance()->current_test_info() == nullptr) return;
  static std::mutex mutex;
  static auto& largest_of = *new std::map<const ::testing::TestInfo*, double>;
  const std::lock_guard lock(mutex);
  double& most = largest_of[::testing::UnitTest::GetInstance()->current_test_info()];
  most = std::max(most, share);
  std::ostringstream text;
  text.precision(2);
  text << most;
  ::testing::Test::RecordProperty("error / allowed", text.str());
}

}  // namespace

double unit_roundoff(at::ScalarType type) { return annulus::unit_roundoff(type); }

double largest(const at::Tensor& t) {
  return t.numel() == 0 ? 0 : t.masked_fill(t.isfinite().logical_not(), 0).abs().max().item<double>();
}

double error_of(const at::Tensor& got, const at::Tensor& exact) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (!got.defined() || got.sizes() != exact.sizes()) return kInfinity;
  const at::Tensor g = got.detach().to(at::kCPU, at::kDouble), e = exact.detach().to(at::kCPU, at::kDouble);
  const at::Tensor equal = g.eq(e).logical_or(g.isnan().logical_and(e.isnan()));
  if (!equal.logical_or(g.isfinite().logical_and(e.isfinite())).all().item<bool>()) return kInfinity;
  return largest((g - e).masked_fill(equal, 0));
}

::testing::AssertionResult within(double error, double allowed) {
  record(allowed > 0 ? error / allowed : error > 0 ? std::numeric_limits<double>::infinity() : 0);
  if (error <= allowed) return ::testing::AssertionSuccess();  // NaN is not
  return ::testing::AssertionFailure() << "off by " << error << ", allowed are " << allowed;
}

::testing::AssertionResult agrees(const at::Tensor& got, const at::Tensor& want, std::optional<double> terms) {
  return within(error_of(got, want), kExact * terms.value_or(largest(want.detach())));
}

::testing::AssertionResult as_exact_as(const at::Tensor& got, const at::Tensor& usual, const at::Tensor& exact,
                                       std::optional<double> terms, std::optional<double> unit) {
  const double rounding = unit.value_or(std::max(unit_roundoff(got.scalar_type()), unit_roundoff(usual.scalar_type())));
  const double size = terms.value_or(largest(exact.detach())), plain = error_of(usual, exact);
  return within(error_of(got, exact), kMultiple * (plain + rounding * size))
         << ": " << kMultiple << " times the error of a plain computation, " << plain << ", and the rounding of "
         << size;
}

}  // namespace annulus::testing
