// Exact attention over all ranks of a communicator. Used by the modules, torch.ops.annulus, `annulus attend` and
// `annulus logits`, training, benchmarks, and programs that embed annulus (docs/embedding.md).
//
// There are two stateless functions, forward and backward, and `attention`, an autograd node around them. All data that
// the backward needs are explicit tensors. docs/attention.md has the mathematics; the backward is that of
// FlashAttention (arXiv 2205.14135, algorithm 4) with the merged out and lse.
//
// Shapes, with n queries and m keys of this rank, in the storage order of the layout:
//   q [B, n, H, D]; k and v [B, m, Hk, D]; out like q; lse [B, H, n], the natural logarithm of the softmax denominators
//   of the scaled scores, -inf for queries without keys
// Dtypes: fp32, fp64, bf16, fp16. Accumulation and lse are fp32, or fp64 for fp64 inputs; out has q's dtype.
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

class AgreedCalls;

// Everything about a call that is not a tensor. All ranks pass the same values, except for `comm` and `poll`.
struct AttentionCall {
  PlanRequest request;           // what is computed, over comm's ranks; the program is cached under it
  Communicator* comm = nullptr;  // must not be null; `attention` shares its ownership until the backward has run
  KernelKind kernel = KernelKind::kAuto;
  std::optional<double> scale;  // the factor of q.k; 1 / sqrt(D) unless given
  Dropout dropout;
  std::string label = "attention";  // names the call in error messages: "attention, layer 3"
  // Whether the first call of a request proves its plan before keys and values are sent; later calls find the proof by
  // the request's text. A request with an adaptive pattern is proved by every call (prove.h). All ranks must agree.
  bool prove = proves_by_default();
  // Called between pieces of computation of a few milliseconds, in the backward, too. It must advance pending
  // transfers, including those of comm. If empty, comm->progress() is called, provided that comm has several ranks.
  std::function<void()> poll = nullptr;
  // Set by agree_ahead (agreed_calls.h): the ranks have agreed on this call, so it makes no agreement of its own.
  std::shared_ptr<const AgreedCalls> agreed = nullptr;
};

// A call that also keeps its communicator alive. Autograd nodes hold one from forward to backward. The constructor
// raises Error(kUsage) if the communicator is not owned by a std::shared_ptr.
class KeptCall {
 public:
  explicit KeptCall(AttentionCall call);
  const AttentionCall& call() const { return call_; }

 private:
  AttentionCall call_;
  std::shared_ptr<Communicator> comm_;
};

struct AttentionOutput {
  std::shared_ptr<const Program> program;  // the program that ran, with the block maps that it selected
  at::Tensor out;                          // not divided by output_divisor(pattern); attention() does that
  at::Tensor lse;
  at::Tensor saved_k;  // the keys that the rank held last, [rows, D]; undefined if the plan keeps none
  at::Tensor saved_v;  // the values of the same rows
  // Whether the rank's own keys and values were found to be finite, so that the backward need not look again.
  Finite own_keys = Finite::kUnknown;
  int64_t number = 0;  // of this call (Communicator::number_call); the ranks compare it before the backward
};

struct AttentionGradients {
  at::Tensor dq, dk, dv;  // with the shapes and dtypes of q, k, v
};

// What a call really did on this rank, for tests, metrics and benchmarks. A buffer's tensors count as held for as long
// as they exist, for whatever reason (travelling_blocks.h).
struct AttentionStats {
  int64_t peak_kv_elements = 0;      // the most K and V elements held at once: own, travelling and saved ones
  int64_t peak_grad_elements = 0;    // the same for dK and dV, including the rank's own
  int64_t peak_result_elements = 0;  // the most elements of a kernel's dK and dV results before they are added
  int64_t messages_sent = 0;         // tensors of keys, values and gradients: two for each transfer
  int64_t bytes_sent = 0;
  int64_t bytes_lent = 0;  // the part of bytes_sent that was lent to ranks of this host (Communicator::lendable)
  // The time spent waiting for transfers on a CPU. 0 on a GPU, where it is measured by events and known only once the
  // device has reached them: see comm->stats().
  double exposed_seconds = 0;
};

// Collective. Raises Error(kMismatch) on every rank if plan, dtype, head size, scale, dropout, kernel, device or label
// differ between ranks, or if they are in the backwards of different calls (which is not compared for calls agreed on
// ahead, agreed_calls.h); Error(kPlan) if the tensors of a rank do
// not fit the request; Error(kInternal) if the plan turns out to be wrong; and Error(kComm) if a transfer fails or
// misses its deadline. `stats`, if given, is overwritten.
AttentionOutput attention_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const AttentionCall& call, AttentionStats* stats = nullptr);

// `forward` is what attention_forward returned for these q, k and v. Without forward.program the backward looks up the
// program of call.request, as the forward does; for an adaptive pattern forward.program is required.
AttentionGradients attention_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                                      const at::Tensor& v, AttentionOutput forward, const AttentionCall& call,
                                      AttentionStats* stats = nullptr);

// Returns out divided by output_divisor(pattern), differentiable in q, k and v. The backward is collective, too: every
// rank must run it. Raises the errors of attention_forward and KeptCall.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionCall& call);

}  // namespace annulus
