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

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "attention/execution/prove.h"
#include "attention/kernels/choose_kernel.h"
#include "attention/plan/plan.h"
#include "comm/communicator.h"

namespace annulus {

// Everything about a call that is not a tensor. All ranks give the same but for `comm`.
struct AttentionCall {
  PlanRequest request;           // what is computed, over comm's ranks; its program is found or made by it
  Communicator* comm = nullptr;  // of this call; `attention` keeps a share of it until the backward has run
  KernelKind kernel = KernelKind::kAuto;
  std::optional<double> scale;  // of q.k; 1 / sqrt(D) unless given
  Dropout dropout;
  std::string label = "attention";  // in error messages: "attention, layer 3"
  // The first call of a request proves its plan before anything is sent by it, and every call of an adaptive one does
  // (prove.h); others look the proof up by the request's text. False: nobody does.
  bool prove = proves_by_default();
  // Called between pieces of computation of a few milliseconds, in the backward, too; it moves along what is under way,
  // comm's transfers included. None: comm's progress(), where it has other ranks.
  std::function<void()> poll = nullptr;
};

// A call that outlives its caller, and keeps the communicator with it: what autograd nodes hold from forward to
// backward. Raises Error(kUsage) where there is a communicator that no std::shared_ptr holds.
class KeptCall {
 public:
  explicit KeptCall(AttentionCall call);
  const AttentionCall& call() const { return call_; }

 private:
  AttentionCall call_;
  std::shared_ptr<Communicator> comm_;
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

// What a call did, for tests, metrics and benchmarks: counted, not planned. What is held are all tensors of buffers
// that exist, alive or kept for whatever reason (travelling_blocks.h).
struct AttentionStats {
  int64_t peak_kv_elements = 0;      // K and V elements held at once: own, travelling, saved
  int64_t peak_grad_elements = 0;    // dK and dV likewise, own included
  int64_t peak_result_elements = 0;  // a kernel's dK and dV results before they are added
  int64_t messages_sent = 0;         // of keys, values and gradients: two a transfer
  int64_t bytes_sent = 0;
  double exposed_seconds = 0;  // waiting for transfers
};

// The backward without `forward.program` looks the program of call.request up, as the forward does; of an adaptive
// pattern it needs the program.
//
// Collective. Raises Error(kMismatch) on every rank when plan, shapes, dtypes, scale or call number differ between
// ranks, Error(kPlan) when the tensors do not fit the program, Error(kInternal) when the plan is not proved,
// Error(kComm) when a transfer fails or misses its deadline.
AttentionOutput attention_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const AttentionCall& call, AttentionStats* stats = nullptr);

AttentionGradients attention_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                                      const at::Tensor& v, AttentionOutput forward, const AttentionCall& call,
                                      AttentionStats* stats = nullptr);

// out, divided by output_divisor of the pattern, differentiable in q, k and v. The backward is collective too: every
// rank must run it.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionCall& call);

}  // namespace annulus
