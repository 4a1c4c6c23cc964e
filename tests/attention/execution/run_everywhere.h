// One attention call over many ranks (threads), forward and backward, put together again and compared with the fp64
// oracle: for the tests of attention.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "attention/execution/attention.h"
#include "attention/oracle/oracle.h"
#include "attention/plan/plan.h"
#include "comm/communicator.h"
#include "common/error.h"

namespace annulus::testing {

// Whole tensors: q and dout [B, Sq, H, D], k and v [B, Sk, Hk, D].
struct Inputs {
  at::Tensor q, k, v, dout;
};

// Normally distributed; q and k times `magnitude`.
Inputs random_inputs(const AttentionShape& shape, int64_t head_dim, at::ScalarType type, double magnitude = 1);

// The positions of the spans, in their order, along dimension `dim`.
at::Tensor rows_of(const at::Tensor& whole, int64_t dim, const std::vector<Span>& spans);

struct RankResults {
  OracleResult result;  // whole tensors, in the dtypes that attention returned
  std::vector<AttentionStats> forward, backward;
};

// All ranks' parts of the request, as threads; the parts put together again.
RankResults run_everywhere(const PlanRequest& request, const Inputs& in, KernelKind kernel,
                           std::optional<double> scale = {});

OracleResult oracle_of(const PlanRequest& request, const Inputs& in, std::optional<double> scale = {});

// The largest difference; infinite where infinities and NaN stand in different places.
double error_of(const at::Tensor& got, const at::Tensor& want);

// The errors of out, lse and the gradients, each relative to the size of what is compared. dq and dk are differences of
// terms as large as the inputs are (`magnitude`), and may cancel to nothing: they are never measured against less.
std::vector<double> errors(const OracleResult& got, const OracleResult& want, double magnitude = 1e-3);

// Three ranks run `body`; it must raise this kind of error, with `part` in its text, on every one of them.
void expect_refused_everywhere(const std::function<void(Communicator&)>& body, ErrorKind kind, const std::string& part);

}  // namespace annulus::testing
