// Vectorized weighted sum of rows, in the version for this processor (common/simd/versions.h). Used by merge.cc.
#pragma once

#include <cstdint>

namespace annulus {

// Sets out[d] to the sum over s < count of weights[s] * rows[s][d], in the order of s, for 0 <= d < dim; count >= 1.
// `out` may be one of the rows. T is float or double. Instruction sets with fused multiply-add round once per term,
// others twice.
template <typename T>
void weighted_sum(const T* const* rows, const T* weights, int64_t count, int64_t dim, T* out);

}  // namespace annulus
