// Adds up weighted rows in vectors, in the version for this processor (common/simd/versions.h). Used by merge.cc.
#pragma once

#include <cstdint>

namespace annulus {

// Sets out[d] to the sum over s of weights[s] * rows[s][d], added in the order of s, for 0 <= d < dim. `count` is the
// number of rows, at least 1. `out` may be one of the rows. T is float or double. Instruction sets with fused
// multiply-adds round once for each product that is added, others twice.
template <typename T>
void weighted_sum(const T* const* rows, const T* weights, int64_t count, int64_t dim, T* out);

}  // namespace annulus
