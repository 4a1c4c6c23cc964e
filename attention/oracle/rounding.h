// What rounding to a dtype costs, and how far results of attention may be from the oracle's because of it. Used by
// `annulus attend --check` and by the GPU benchmark; unit tests measure the error of a plain computation instead
// (tests/common/exactness.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace annulus {

// Returns the largest relative error of rounding a number to the dtype: 2^-53, 2^-24, 2^-11 (fp16) or 2^-8 (bf16).
double unit_roundoff(at::ScalarType dtype);

// Returns the error that is allowed relative to the magnitude of what is added up to a result, for inputs of this
// dtype, scores of this size and sums of so many terms.
//
// A sum of n terms in any order is off by more than 6 sqrt(n) roundings with a probability of 2 exp(-18) (Higham and
// Mary, A new approach to probabilistic rounding error analysis, 2019, theorem 2.4). A score is such a sum: its error
// is relative to its size and becomes a relative error of probabilities. Sums are fp32, or fp64 for fp64. In a narrower
// dtype six numbers on the way are rounded to it: the scaled query, the probability, out, the gradient of the score,
// and the result, before and after results of several tiles are added up.
double rounding_bound(at::ScalarType dtype, double scores, int64_t terms);

}  // namespace annulus
