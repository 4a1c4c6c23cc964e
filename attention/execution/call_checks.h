// Checks, before keys and values are sent, that all ranks are in the same call of the same plan with tensors that fit
// it. This takes one small collective for each call (agree_together), unless the ranks have agreed on the call ahead
// (agreed_calls.h). If one rank refuses its own tensors or plan, all ranks raise the error. Internal to the executor
// and agreed_calls.cc.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "attention/execution/agreed_calls.h"
#include "attention/execution/attention.h"
#include "attention/proof/proofs.h"
#include "comm/agreement.h"

namespace annulus {

class AgreedCalls {
 public:
  // Both take what terms_of() returned.
  void add(const std::vector<Field>& terms);
  bool has(const std::vector<Field>& terms) const;

 private:
  std::set<std::string> calls_;
};

// What all ranks must share in a call: its label, plan, dtype, scale, dropout and so on. `plan` is the text of the
// call's request, or of that with the block maps that an adaptive one has selected.
std::vector<Field> terms_of(const AttentionCall& call, const std::string& plan, const TensorTraits& tensors);
// Raises Error(kPlan) unless the communicator has as many ranks as the plan.
void require_communicator(const AttentionCall& call);
// cached_share(). A step waits for a proof that was not made ahead, so its time is counted as planning.
std::shared_ptr<const RankShare> timed_share(const PlanRequest& request, const Program& program);

// `find` is called first; it looks up the plan (which checks a new request) and returns whether this rank asks for the
// plan's proof. The function returns on all ranks whether any of them asks; false if the call was agreed on ahead. It
// raises what agree_together raises: Error(kMismatch) for differences between ranks, or the error of the ranks that
// failed. Collective.
bool agree_on_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionCall& call,
                      const std::function<bool()>& find);
// The same for the backward. Looks up forward.program if it is null and the pattern is not adaptive. Collective.
void agree_on_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       AttentionOutput& forward, const AttentionCall& call);

// The scale of the call, or 1 / sqrt(D) if it gives none.
double scale_of(const at::Tensor& q, const AttentionCall& call);

}  // namespace annulus
