// See rounding.h.
#include "attention/oracle/rounding.h"

#include <cmath>

namespace annulus {

double unit_roundoff(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return 0x1p-53;
    case at::kHalf:
      return 0x1p-11;
    case at::kBFloat16:
      return 0x1p-8;
    default:
      return 0x1p-24;
  }
}

double rounding_bound(at::ScalarType dtype, double scores, int64_t terms) {
  const bool narrow = dtype == at::kHalf || dtype == at::kBFloat16;
  const double of_sums = 6 * std::sqrt(static_cast<double>(terms)) * unit_roundoff(narrow ? at::kFloat : dtype);
  return of_sums * (1 + scores) + (narrow ? 6 * unit_roundoff(dtype) : 0);
}

}  // namespace annulus
