// Exact attention over all ranks of a communicator, for programs that embed annulus (docs/reference/cpp.md) and for
// the modules, `annulus logits` and generated text. With q, k and v of this rank's part of a sequence:
//
//     AttentionCall call;
//     call.comm = &comm;
//     call.request = {.shape = {1, 8, 8, length, length}, .pattern = causal_pattern(), .ranks = comm.size()};
//     const at::Tensor out = attention(q, k, v, call);
//
// Shapes, with n queries and m keys of this rank, in the storage order of the layout (query_layout, key_layout):
//   q [B, n, H, D]; k and v [B, m, Hk, D]; out like q
// Dtypes: fp32, fp64, bf16, fp16. Accumulation is fp32, or fp64 for fp64 inputs.
// Thread safety: calls on different communicators may run at the same time.
//
// planned_call.h has the forward and the backward by themselves, and calls that are planned before they are made.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "attention/kernels/choose_kernel.h"
#include "attention/plan/plan.h"
#include "comm/communicator.h"

namespace annulus {

struct AttentionCall;

// Collective, and so is its backward: every rank must run both. Differentiable in q, k and v, and divided by
// output_divisor(pattern).
//
// Raises Error(kMismatch) on every rank if the ranks differ in anything but their tensors' content, or if they are in
// the backwards of different calls; Error(kPlan) if the tensors of a rank do not fit the request; Error(kUsage) if the
// communicator is not owned by a std::shared_ptr, which the backward needs; Error(kInternal) if the plan turns out to
// be wrong; and Error(kComm) if a transfer fails or misses its deadline.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionCall& call);

// The same with a learned logit for each query head in the denominator of its softmax, sinks [H] (sinks.h), in which it
// is differentiable as well; call.sinks need not be set. Each rank's gradient of the sinks is the part of its own
// queries. As for any weight that all ranks have, the caller adds these parts up over the ranks.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& sinks,
                     AttentionCall call);

// The default of AttentionCall::prove: true unless ANNULUS_PROVE is 0. Raises Error(kUsage) if the variable is neither
// 0 nor 1. If ranks differ in it, the first call raises an error on all of them.
bool proves_by_default();

// Everything about a call that is not a tensor. All ranks pass the same values, except for `comm`.
struct AttentionCall {
  PlanRequest request;           // what is computed, over comm's ranks; the plan is cached under it
  Communicator* comm = nullptr;  // must not be null; `attention` shares its ownership until the backward has run
  KernelKind kernel = KernelKind::kAuto;
  std::optional<double> scale;  // the factor of q.k; 1 / sqrt(D) unless given
  // A soft cap c of the scores, as in Gemma 2: c tanh(scale q.k / c) instead of scale q.k. From 1e-30 to 1e30; 0: none.
  double softcap = 0;
  bool sinks = false;  // whether every rank passes sinks
  Dropout dropout;
  std::string label = "attention";  // names the call in error messages: "attention, layer 3"
  // Whether the first call of a request proves its plan before keys and values are sent; later calls find the proof
  // with the plan. A request with an adaptive pattern is proved by every call (prove.h). All ranks must agree.
  bool prove = proves_by_default();
};

}  // namespace annulus
