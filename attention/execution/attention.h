// Exact attention over all ranks of a communicator: what models and `annulus attend` call.
//
// Two stateless functions, forward and backward, and `attention`, an autograd node around them. All data the backward
// needs is an explicit tensor. The mathematics: docs/attention.md; FlashAttention's backward (arXiv 2205.14135,
// algorithm 4) with the merged out and lse.
//
// Shapes (n = rows of this rank's queries, m = of its keys, in the layout's storage order):
//   q [B, n, H, D], k and v [B, m, Hk, D]; out like q; lse [B, H, n] natural log, scale included, -inf for empty rows
// Dtypes: fp32, fp64, bf16, fp16. Accumulation and lse are fp32, for fp64 inputs fp64; out has q's dtype.
// Thread safety: calls on different communicators may run at the same time; programs are immutable.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <string_view>

#include "attention/kernels/kernel.h"
#include "attention/plan/plan.h"
#include "comm/communicator.h"

namespace annulus {

// Everything about a call that is not a tensor.
struct AttentionCall {
  PlanRequest request;           // of comm's size
  Communicator* comm = nullptr;  // must outlive the call and its backward
  KernelKind kernel = KernelKind::kAuto;
  double scale = 0;  // 0: 1 / sqrt(D)
  Dropout dropout;
  std::string label = "attention";  // in error messages: "attention, layer 3"
  // This rank's program, where it is not to be looked up by the request: a pattern made by a program.
  std::shared_ptr<const Program> program;
};

struct AttentionOutput {
  std::shared_ptr<const Program> program;  // what ran, for the backward: adaptive block maps are frozen in it
  at::Tensor out;                          // not divided by output_divisor(pattern): attention() does that
  at::Tensor lse;
  at::Tensor saved_k;  // last-held keys and values, [rows, D]; undefined where the plan keeps none
  at::Tensor saved_v;
};

struct AttentionGradients {
  at::Tensor dq, dk, dv;  // shapes and dtypes of q, k, v
};

// What a call did, for tests, metrics and benchmarks: counted, not planned.
struct AttentionStats {
  int64_t peak_kv_elements = 0;      // K and V elements held at once: own, travelling, saved
  int64_t peak_grad_elements = 0;    // dK and dV likewise, own included
  int64_t peak_result_elements = 0;  // a kernel's dK and dV results before they are added
  int64_t messages_sent = 0;         // of keys, values and gradients: two a transfer
  int64_t bytes_sent = 0;
  double exposed_seconds = 0;  // waiting for transfers
};

// Proves the plan of a request (attention/plan/verifier.h) on rank 0 before anything is sent by it; what it finds is an
// Error(kInternal) on every rank: the fault would be annulus's own. Seconds for a million tokens over 64 ranks; plans
// of more than 128 ranks are left to `annulus plan`, where they take minutes, and adaptive patterns, whose plans are
// made at each call, to the tests. Collective.
void prove_plan(const PlanRequest& request, Communicator& comm);

// Collective. Raises Error(kMismatch) on every rank when plan, shapes, dtypes, scale or call number differ between
// ranks, Error(kPlan) when the tensors do not fit the program, Error(kComm) when a transfer fails or misses its
// deadline.
AttentionOutput attention_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const AttentionCall& call, AttentionStats* stats = nullptr);

AttentionGradients attention_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                                      const at::Tensor& v, const AttentionOutput& forward, const AttentionCall& call,
                                      AttentionStats* stats = nullptr);

// out, divided by output_divisor of the pattern, differentiable in q, k and v. The backward is collective too: every
// rank must run it.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionCall& call);

}  // namespace annulus
