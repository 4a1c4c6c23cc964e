// See agreed_calls.h.
#include "attention/execution/agreed_calls.h"

#include <algorithm>
#include <string>
#include <utility>

#include "attention/execution/call_checks.h"
#include "attention/execution/prove.h"
#include "attention/proof/proofs.h"
#include "comm/agreement.h"
#include "common/error.h"

namespace annulus {

void agree_ahead(const std::vector<AttentionCall*>& calls, const TensorTraits& tensors, OpLabel label) {
  if (calls.empty()) return;
  Communicator& comm = *calls.front()->comm;
  const auto agreed = std::make_shared<AgreedCalls>();
  // The different requests, in the order of the calls, and so the same on all ranks once they have agreed.
  struct Plan {
    const PlanRequest* request;
    std::string text = {};                                // empty on a rank that is alone
    std::shared_ptr<const Program> program = nullptr;     // null for an adaptive pattern
    std::shared_ptr<const RankShare> to_prove = nullptr;  // null if no call wants a proof
  };
  std::vector<Plan> plans;
  const auto asked = agree_together(comm, label, [&]() -> Terms {
    Terms terms;
    for (size_t i = 0; i < calls.size(); ++i) {
      const AttentionCall& call = *calls[i];
      if (call.comm != &comm) {
        throw Error(ErrorKind::kPlan, "attention",
                    call.label + ": calls over different communicators cannot be agreed on together");
      }
      require_communicator(call);
      auto plan = std::find_if(plans.begin(), plans.end(), [&](const Plan& p) { return *p.request == call.request; });
      if (plan == plans.end()) {
        plan = plans.insert(plan, {&call.request});
        if (comm.size() > 1) plan->text = call.request.text();
        if (is_adaptive(call.request.pattern)) {
          validate(call.request);
        } else {
          plan->program = cached_program(call.request, comm.rank());
        }
      }
      if (plan->program && call.prove && !plan->to_prove) {
        plan->to_prove = timed_share(call.request, *plan->program);
        if (!*plan->to_prove->shown) terms.numbers[0] = 1;
      }
      if (comm.size() == 1) continue;
      const std::vector<Field> own = terms_of(call, plan->text, tensors);
      agreed->add(own);
      for (const Field& field : own) {
        terms.alike.push_back({"call " + std::to_string(i + 1) + ", " + field.name, field.value});
      }
    }
    return terms;
  });
  if (std::any_of(asked.begin(), asked.end(), [](const Terms::Numbers& asks) { return asks[0] != 0; })) {
    for (const Plan& plan : plans) {
      if (plan.to_prove) prove_together(*plan.to_prove, *plan.request, comm);
    }
  }
  for (AttentionCall* call : calls) call->agreed = agreed;
}

}  // namespace annulus
