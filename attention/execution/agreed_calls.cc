// See agreed_calls.h.
#include "attention/execution/agreed_calls.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "attention/execution/call_checks.h"
#include "attention/execution/prove.h"
#include "attention/plan/proofs.h"
#include "comm/agreement.h"
#include "common/error.h"

namespace annulus {

void agree_ahead(std::vector<AttentionCall*> calls, const TensorTraits& tensors, OpLabel label) {
  if (calls.empty()) return;
  Communicator& comm = *calls.front()->comm;
  const auto agreed = std::make_shared<AgreedCalls>();
  struct Provable {
    const PlanRequest* request;
    std::shared_ptr<const RankShare> share;
  };
  std::map<std::string, Provable> plans;  // by text, so that all ranks prove them in the same order
  const auto asked = agree_together(comm, label, [&]() -> Terms {
    Terms terms;
    for (size_t i = 0; i < calls.size(); ++i) {
      const AttentionCall& call = *calls[i];
      require_communicator(call);
      const std::vector<Field> own = terms_of(call, call.request, tensors);
      agreed->add(own);
      for (const Field& field : own) {
        terms.alike.push_back({"call " + std::to_string(i + 1) + ", " + field.name, field.value});
      }
      if (is_adaptive(call.request.pattern)) {
        validate(call.request);
        continue;
      }
      const auto [plan, fresh] = plans.try_emplace(call.request.text(), Provable{&call.request, nullptr});
      if (!fresh) continue;
      const auto program = cached_program(call.request, comm.rank());
      if (!call.prove) continue;
      plan->second.share = timed_share(call.request, *program);
      if (!*plan->second.share->shown) terms.numbers[0] = 1;
    }
    return terms;
  });
  if (std::any_of(asked.begin(), asked.end(), [](const Terms::Numbers& asks) { return asks[0] != 0; })) {
    for (const auto& [text, plan] : plans) {
      if (plan.share) prove_together(*plan.share, *plan.request, comm);
    }
  }
  for (AttentionCall* call : calls) call->agreed = agreed;
}

}  // namespace annulus
