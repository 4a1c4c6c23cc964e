// For the tests of attention: what results must be, and how exact (tests/common/exactness.h). A plain chain of
// LibTorch's operators on dense scores gives the results in any dtype, and the magnitudes of what is added up to them.
#pragma once

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <optional>

#include "attention/oracle/oracle.h"

namespace annulus::testing {

// Some query heads that read one kv head, or the same number of both. q and dout [..., n, D], k and v [..., m, D].
struct DenseAttention {
  at::Tensor q, k, v, dout;
  at::Tensor log_counts;  // [..., n, m]: the logarithm of how often a pair counts; -inf hides it
  at::Tensor factors;     // of dropout, [..., n, m]; undefined for none
  double scale = 1;
  double softcap = 0;     // of scores; 0: none
  at::Tensor sinks = {};  // broadcasts to [..., n]; undefined for none
};

// Computes in dtype `type`, and rounds to `rounded` what kernels of such inputs round: the probabilities, the out that
// the backward starts from and the gradients of scores. dk and dv have the heads of q. Rows that see no key have out 0
// and lse -inf. dsinks are those of each head of each batch row. Tensors may be on any device.
OracleResult plain_attention(const DenseAttention& in, at::ScalarType type, at::ScalarType rounded);

// The results, and what decides how exact they can be.
struct Expected : OracleResult {
  OracleResult usual;  // by plain_attention in the dtype of the inputs; undefined for fp64
  OracleResult terms;  // for each element, the sum of the magnitudes of the terms that it is the sum of
  double scores = 0;   // the largest sum of magnitudes that is a score, or a sink
};

// Returns the terms of the results in fp64, for which all numbers are replaced by their absolute values, except that
// probabilities are those of `in`. Sets `scores` to the larger of it and the largest score's.
OracleResult terms_of(const DenseAttention& in, double& scores);

// Returns what is expected of attention over whole tensors, q and dout [B, Sq, H, D], k and v [B, Sk, Hk, D], whose
// results are rounded to the dtype of the inputs. log_counts broadcasts to [B, H, Sq, Sk].
Expected expected_from(const OracleResult& exact, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const at::Tensor& dout, const at::Tensor& log_counts, double scale,
                       const OracleSoftmax& softmax = {});

// Returns the largest magnitude that any result is the sum of, including what the rounding of scores adds to it.
double magnitude_of(const Expected& want);

// Whether results are as exact as their dtype, that of the inputs, allows. In fp64 they agree with the definition up to
// rounding. In other dtypes the error is at most a multiple of the plain chain's. A score is rounded like a sum of its
// size, which changes its probability, and with it all results, by that share: so much is allowed in addition. `unit`
// is the unit roundoff of products and sums, by default that of fp32, or fp64 for fp64.
::testing::AssertionResult as_exact(const OracleResult& got, const Expected& want, at::ScalarType type,
                                    std::optional<double> unit = {});

// For one result of them: a member of OracleResult.
::testing::AssertionResult as_exact(at::Tensor OracleResult::*result, const at::Tensor& got, const Expected& want,
                                    at::ScalarType type, std::optional<double> unit = {});

}  // namespace annulus::testing
