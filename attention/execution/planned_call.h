// The forward and the backward of attention (attention.h) by themselves, and calls that are planned before they are
// made. Used by training, the modules, torch.ops.annulus, `annulus attend`, `annulus logits` and benchmarks.
//
// Forward and backward are stateless: all data that the backward needs are in the forward's output.
// docs/explanation/attention.md has the mathematics; the backward is that of FlashAttention (arXiv 2205.14135,
// algorithm 4) with the merged out and lse.
//
// Shapes, dtypes and thread safety are those of attention.h. lse is [B, H, n], the natural logarithm of the softmax
// denominators of the scaled scores, -inf for queries without keys, in fp32, or fp64 for fp64 inputs. It includes sinks
// (sinks.h): with them it is the sink's logit for queries without keys.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "attention/execution/attention.h"
#include "attention/proof/plans.h"
#include "attention/tiles/kernel_input.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "common/checksum.h"

namespace annulus {

// The properties of q, k and v that all ranks must share.
struct TensorTraits {
  at::ScalarType dtype = at::kFloat;
  int64_t head_dim = 0;
  c10::DeviceType device = at::kCPU;

  friend bool operator==(const TensorTraits&, const TensorTraits&) = default;
};
TensorTraits traits_of(const at::Tensor& q);

// A call with its plan: what identifies it from its planning to the end of its backward. plan_calls plans it, or else
// its first forward; after that its request is looked up no more. It keeps the communicator alive if a std::shared_ptr
// owns it. Copies are the same call. One thread may use a call at a time.
class PlannedCall {
 public:
  PlannedCall() = default;
  // Not planned yet, unless `plan` is given: the plan that an earlier forward selected for an adaptive pattern. `poll`
  // is called between pieces of computation of a few milliseconds, in the backward, too. It must advance pending
  // transfers, including those of call.comm. If empty, comm->progress() is called if comm has several ranks.
  PlannedCall(AttentionCall call, std::function<void()> poll = nullptr, std::shared_ptr<const RankPlan> plan = nullptr);

  const AttentionCall& settings() const;
  // Null before the call is planned. An adaptive pattern has one only in a forward's output: what q and k selected.
  const std::shared_ptr<const RankPlan>& plan() const { return state_->plan; }
  const std::function<void()>& poll() const { return state_->poll; }
  // Raises Error(kUsage) unless the call keeps its communicator alive. For autograd nodes.
  void require_kept() const;

  // ---- For plan_calls and the executor

  // Plans the call on this rank, unless it is planned or adaptive. Raises the errors of planning.
  void find_plan() const;
  // Whether this rank asks for the proof of the plan; its share of the proof is then made. Of a planned call.
  bool asks_for_proof() const;
  // The digest of all that ranks must share in a call with such tensors, settings and plan. It is made once.
  Digest digest(const TensorTraits& tensors) const;
  // What the digest stands for, as texts.
  std::vector<Field> fields(const TensorTraits& tensors) const;
  // The same call with the plan that q and k have selected.
  PlannedCall with(std::shared_ptr<const RankPlan> selected) const;
  // The tensors for which plan_calls has let the ranks agree on the call; empty if it makes its own agreement.
  const std::optional<TensorTraits>& agreed() const { return state_->agreed; }

 private:
  friend void plan_calls(const std::vector<PlannedCall>& calls, const TensorTraits& tensors, OpLabel label);

  struct State {
    AttentionCall settings;
    std::function<void()> poll;
    std::shared_ptr<Communicator> kept;
    std::shared_ptr<const RankPlan> plan;
    std::optional<TensorTraits> agreed;
    std::optional<TensorTraits> digested;  // the tensors that `digest` is for
    Digest digest{};
  };
  std::shared_ptr<State> state_;
};

// Collective over the calls' communicator, which must be the same for all. Lets the ranks agree once, ahead, on calls
// that they are about to make, so that the calls themselves wait for no other rank before they begin. Each rank plans
// its calls; if they differ, or one rank cannot make a plan, every rank raises the error that a call would have raised,
// and nothing has been sent. If a rank asks for the proof of a plan, all plans that the calls have are proved now
// (adaptive patterns are still planned and proved by each call). This is one small collective, whatever the number of
// calls, and proofs; the result is the same decision on all ranks, and does not depend on what a rank has in its
// caches.
//
// Forward and backward of a call make no agreement afterwards; nor is it compared whose backward a backward is. A rank
// whose tensors are not those that were agreed on raises Error(kPlan) alone, and the other ranks notice by their
// deadlines.
void plan_calls(const std::vector<PlannedCall>& calls, const TensorTraits& tensors, OpLabel label);

struct AttentionOutput {
  PlannedCall call;  // as it ran: an adaptive pattern has the plan of the blocks that were selected
  // Whether the rank's own keys and values were found to be finite, so that the backward need not look again.
  Finite own_keys = Finite::kUnknown;
  int64_t number = 0;  // of this call (Communicator::number_call); the ranks compare it before the backward
  at::Tensor out;      // not divided by output_divisor(pattern); attention() does that
  at::Tensor lse;
  at::Tensor saved_k;  // the keys that the rank held last, [rows, D]; undefined if the plan keeps none
  at::Tensor saved_v;  // the values of the same rows
  at::Tensor sinks;    // as they were given; undefined without sinks

  const Program& program() const { return call.plan()->program; }
  // The same with other tensors: autograd nodes keep them by themselves.
  AttentionOutput with(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& k, const at::Tensor& v,
                       const at::Tensor& sinks) const {
    return {call, own_keys, number, out, lse, k, v, sinks};
  }
};

// Whether the backward lends saved_k and saved_v to the rank that it sends them to (comm/lending.h). Where they were
// kept elsewhere meanwhile, they should then return to lendable memory, or they are copied.
bool lends_saved(const AttentionOutput& forward);

struct AttentionGradients {
  at::Tensor dq, dk, dv;   // with the shapes and dtypes of q, k, v
  at::Tensor dsinks = {};  // with those of the sinks: the part of this rank's queries; undefined without sinks
};

// What a call really did on this rank, for tests, metrics and benchmarks. A buffer's tensors count as held for as long
// as they exist, for whatever reason (travelling_blocks.h).
struct AttentionStats {
  int64_t peak_kv_elements = 0;       // the most K and V elements held at once: own, travelling and saved ones
  int64_t peak_grad_elements = 0;     // the same for dK and dV, including the rank's own
  int64_t peak_query_elements = 0;    // the most elements of other ranks' queries, with what travels with them
  int64_t peak_partial_elements = 0;  // the same for results that are not whole or not this rank's
  int64_t peak_result_elements = 0;   // the most elements of a kernel's dK and dV results before they are added
  int64_t messages_sent = 0;          // tensors
  int64_t bytes_sent = 0;
  int64_t bytes_lent = 0;  // the part of bytes_sent that was lent to ranks of this host (Communicator::lendable)
  // The time spent waiting for transfers on a CPU. 0 on a GPU, where it is measured by events and known only once the
  // device has reached them: see comm->stats().
  double exposed_seconds = 0;
};

// Collective. Raises Error(kMismatch) on every rank if plan, dtype, head size, scale, soft cap, dropout, kernel, device
// or label differ between ranks, or whether there are sinks, or if they are in the backwards of different calls
// (neither is compared for calls of plan_calls); Error(kPlan) if the tensors of a rank do not fit the request;
// Error(kInternal) if the plan turns out to be wrong; and Error(kComm) if a transfer fails or misses its deadline.
// `sinks` [H] are passed if call.sinks. `stats`, if given, is overwritten.
AttentionOutput attention_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const PlannedCall& call, const at::Tensor& sinks, AttentionStats* stats = nullptr);
AttentionOutput attention_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const PlannedCall& call, AttentionStats* stats = nullptr);

// `forward` is what attention_forward returned for these q, k and v. Callers that can keep only tensors from it make
// the rest again: the backward plans forward.call if it is not planned; that of an adaptive pattern must have its plan.
AttentionGradients attention_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                                      const at::Tensor& v, AttentionOutput forward, AttentionStats* stats = nullptr);

// attention() of attention.h, of a call that may be planned ahead.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const PlannedCall& call,
                     const at::Tensor& sinks = {});

}  // namespace annulus
