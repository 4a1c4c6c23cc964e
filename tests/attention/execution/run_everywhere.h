// For the tests of attention: runs one attention call over many ranks (threads), forward and backward, puts the results
// together, and says what they must be by the fp64 oracle.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "attention/dropout/dropout.h"
#include "attention/execution/planned_call.h"
#include "attention/oracle/oracle.h"
#include "attention/plan/plan.h"
#include "comm/communicator.h"
#include "common/error.h"
#include "tests/attention/kernels/plain_attention.h"

namespace annulus::testing {

// Causal attention in the zigzag layout: 2 heads that share one kv head.
PlanRequest causal_zigzag(int ranks, int64_t length);

// Whole tensors: q and dout [B, Sq, H, D], k and v [B, Sk, Hk, D].
struct Inputs {
  at::Tensor q, k, v, dout;
};

// Normally distributed inputs; q and k are multiplied by `magnitude`.
Inputs random_inputs(const AttentionShape& shape, int64_t head_dim, at::ScalarType type, double magnitude = 1);

// Returns the positions of the spans, in their order, along dimension `dim`.
at::Tensor rows_of(const at::Tensor& whole, int64_t dim, const std::vector<Span>& spans);

struct RankResults {
  OracleResult result;  // whole tensors, in the dtypes that attention returned
  std::vector<AttentionStats> forward, backward;
};

// Runs the request with one thread for each rank and puts the parts of the result together. lending: whether ranks lend
// their blocks to each other (Communicator::set_lending); by default they do in every second call. The gradients of
// sinks are the sum of those of the ranks.
RankResults run_everywhere(const PlanRequest& request, const Inputs& in, KernelKind kernel,
                           std::optional<double> scale = {}, std::optional<bool> lending = {},
                           const Dropout& dropout = {}, const OracleSoftmax& softmax = {});

// Adaptive maps are selected by the oracle itself.
OracleResult oracle_of(const PlanRequest& request, const Inputs& in, std::optional<double> scale = {},
                       const Dropout& dropout = {}, const OracleSoftmax& softmax = {});

// Returns the oracle's results, and how exact those of the request can be (plain_attention.h).
Expected expected_of(const PlanRequest& request, const Inputs& in, std::optional<double> scale = {},
                     const OracleSoftmax& softmax = {});

// Runs `body` on three ranks. It must raise an error of this kind, with `part` in its text, on each of them.
void expect_refused_everywhere(const std::function<void(Communicator&)>& body, ErrorKind kind, const std::string& part);

}  // namespace annulus::testing
