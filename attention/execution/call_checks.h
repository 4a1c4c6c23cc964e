// Checks, before keys and values are sent, that all ranks are in the same call of the same plan with tensors that fit
// it. This takes one small collective for each call (agree_together), unless plan_calls has let the ranks agree on the
// call ahead. If one rank refuses its own tensors or plan, all ranks raise the error. Internal to the executor and
// planned_call.cc.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "attention/execution/planned_call.h"
#include "comm/agreement.h"

namespace annulus {

// Raises Error(kPlan) with the call's label before the message.
[[noreturn]] void refuse(const AttentionCall& call, const std::string& message);

// Raises Error(kPlan) unless the communicator has as many ranks as the plan.
void require_communicator(const AttentionCall& call);
// The tensors must be this rank's rows of the request's problem.
void require_fit(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionCall& call);
// The sinks must be one for each head, and given if and only if the call says so.
void require_sinks(const at::Tensor& sinks, const at::Tensor& q, const AttentionCall& call);
// dout must be like q, and `forward`, which is planned, what the forward of the same request returned on this rank.
void require_fit(const at::Tensor& dout, const AttentionOutput& forward, const at::Tensor& q);

// What a rank contributes to an agreement: the digest of all that must be the same on every rank, and whether this rank
// asks for the proof of a plan.
struct Agreed {
  Digest digest;
  bool asks = false;
};
// Collective. Runs `find` on every rank and returns on all of them whether any rank asks. Raises what agree_together
// raises: the error of the ranks whose `find` failed or, if digests differ, Error(kMismatch) that names the ranks and
// the `fields` that differ. These are what the digest was made from, as texts, and are called for only then.
bool any_asks(Communicator& comm, OpLabel label, const std::function<Agreed()>& find,
              const std::function<std::vector<Field>()>& fields);

// any_asks() for one call with this q: its forward, or the backward of the forward with the number `backward_of`. The
// call is planned, and `find` then checks the tensors and returns whether this rank asks. Returns false without a
// collective if the ranks have agreed on the call ahead, and what `find` returns if the rank is alone.
bool agree_on(const PlannedCall& call, const at::Tensor& q, std::optional<int64_t> backward_of,
              const std::function<bool()>& find);

// The scale of the call, or 1 / sqrt(head_dim) if it gives none.
double scale_of(const AttentionCall& call, int64_t head_dim);

}  // namespace annulus
