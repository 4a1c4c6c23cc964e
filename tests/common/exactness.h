// How exact the results of a computation must be, for tests in every package. A bound is never a number that was seen
// on some machine: other instructions or another library add in another order. There are three kinds, from the
// strictest:
//
// - What is equal by mathematics (for any number of ranks, layout, tile or order of parts) is compared in fp64, by
//   `agrees`.
// - Results in a narrower dtype are held to the error that the same computation has if it is done plainly in that
//   dtype, by a chain of LibTorch's operators on the same inputs, here and now: `as_exact_as`.
// - Where an inequality bounds the error, the test computes the bound from `unit_roundoff` and names the inequality.
//
// An error is the largest one of a whole tensor. A passing test records in its XML the largest share of what it was
// allowed ("error / allowed").
#pragma once

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <optional>

namespace annulus::testing {

// Returns the largest relative error of rounding a number to the dtype: 2^-53, 2^-24, 2^-11 (fp16) or 2^-8 (bf16).
double unit_roundoff(at::ScalarType type);

// How far apart results in fp64 may be that are equal by mathematics, relative to the magnitudes of what is added up.
// In any order, a sum of n terms is off by at most gamma_n = n u / (1 - n u) times the sum of their magnitudes (Higham,
// Accuracy and Stability of Numerical Algorithms, section 4.2), and 1e-12 is gamma_n of 9,000 terms.
inline constexpr double kExact = 1e-12;

// How many times the error of a plain computation is allowed. Sums in another order have errors of the same size, but
// the largest of many errors differs by a factor of about two from order to order, and by another one between a single
// running sum and sums that a library keeps in the lanes of several vectors.
inline constexpr double kMultiple = 4;

// Returns the largest absolute value of the finite elements, 0 if there are none.
double largest(const at::Tensor& t);

// Returns the largest difference, or infinity if the shapes differ, if NaN are at different places, or if infinities
// are, or have another sign. Tensors may be of any dtype and on any device.
double error_of(const at::Tensor& got, const at::Tensor& exact);

// Whether the error is at most `allowed`. For bounds that a test derives by itself.
::testing::AssertionResult within(double error, double allowed);

// Whether results of fp64 are equal except for the rounding of sums. `terms` is the magnitude of what is added up to an
// element; without it, that of the largest element, which is too small where large terms cancel.
::testing::AssertionResult agrees(const at::Tensor& got, const at::Tensor& want, std::optional<double> terms = {});

// Whether the error of `got` is at most kMultiple times that of `usual`, the same computation done plainly in the same
// dtype. The error of `usual` is small by luck where it has few elements, so an error of one rounding of `terms` (see
// above) is always added to it. `unit` is the unit roundoff with which `got` was computed, by default that of the
// narrower one of both dtypes.
::testing::AssertionResult as_exact_as(const at::Tensor& got, const at::Tensor& usual, const at::Tensor& exact,
                                       std::optional<double> terms = {}, std::optional<double> unit = {});

}  // namespace annulus::testing
