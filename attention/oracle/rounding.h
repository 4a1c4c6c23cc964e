// Bounds the rounding error of attention in a dtype against the oracle. Used by `annulus attend --check` and by the GPU
// benchmark; unit tests measure the error of a plain computation instead (tests/common/exactness.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace annulus {

// Returns the largest relative error of rounding a number to the dtype: 2^-53, 2^-24, 2^-11 (fp16) or 2^-8 (bf16).
double unit_roundoff(at::ScalarType dtype);

// Returns the allowed error of a result relative to the sum of the magnitudes of its terms, for inputs of this dtype,
// scores of magnitude `scores` and sums of `terms` terms.
//
// A sum of n terms in any order has an error above 6 sqrt(n) unit roundoffs with a probability of at most 2 exp(-18)
// (Higham and Mary, A new approach to probabilistic rounding error analysis, 2019, theorem 2.4). A score is such a sum,
// and its error, proportional to its size, becomes a relative error of probabilities. Sums are fp32, or fp64 for fp64.
// In a narrower dtype six intermediate values are rounded to it: the scaled query, the probability, out, the gradient
// of the score, and the result before and after the results of several tiles are added.
double rounding_bound(at::ScalarType dtype, double scores, int64_t terms);

}  // namespace annulus
