// Computes what a plan costs each rank, and proves it, without running it. Used by `annulus plan`, which prints the
// report, and by the operator torch.ops.annulus.plan, which returns it.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "attention/plan/choice.h"
#include "attention/plan/plan.h"
#include "attention/proof/verifier.h"
#include "memory/available.h"

namespace annulus {

// Something that a rank sends or holds in one direction: the least and the most of all ranks.
struct PlanCost {
  const char* key;
  const char* name;
  bool bytes;
  double least, most;
};

class PlanReport {
 public:
  // Is called with a line about the progress each time another rank is done.
  using Say = std::function<void(const std::string&)>;

  // Takes one rank's program after the other, as they are made.
  using Take = std::function<void(const Program&)>;

  // Makes the plan of all ranks. head_dim and element_bytes (2 for bf16) convert rows to bytes. `prove` says that
  // prove() will be called, for which the programs are kept. Raises Error(kPlan) if the request is invalid or its
  // pattern adaptive, since adaptive blocks are not known before a call, and Error(kResource) if the plan or its proof
  // would not fit into the free memory.
  // The schedule that `auto` stands for is chosen by the request's terms or, without, by those of an unknown CPU; and
  // the layout among `layouts`, if there are any. Raises Error(kPlan) if the plan does not fit the machine's memory.
  PlanReport(const PlanRequest& request, int64_t head_dim, int64_t element_bytes, bool prove, const Say& say,
             const std::vector<LayoutKind>& layouts = {}, const Take& take = nullptr);

  // Proves the plan and returns the proof with its faults. The constructor must have been given prove = true.
  const Proof& prove(const Say& say);

  // The report as one JSON object; "proof" is null before prove().
  std::string json() const;

  const PlanRequest& request() const { return request_; }  // with the schedule that `auto` stands for
  // What was chosen, and from what; of a schedule that was given, its predicted time.
  const PlanChoice& choice() const { return choice_; }
  int64_t pairs() const { return pairs_; }
  double share() const;  // the counted pairs as a share of all pairs of a query and a key
  // The bytes that all ranks together send in the forward, and the least of schedules that move keys and values alone,
  // and of all tilings, with the number of columns of the least (attention/plan/tilings.h).
  struct Sent {
    double bytes = 0, least_of_keys = 0, least_of_tilings = 0;
    int columns = 1;
  };
  const Sent& sent() const { return sent_; }
  const std::vector<PlanCost>& forward() const { return forward_; }
  const std::vector<PlanCost>& backward() const { return backward_; }
  double made_seconds() const { return made_; }
  double proved_seconds() const { return proved_; }

 private:
  void require_memory(double programs);

  PlanRequest request_;
  PlanChoice choice_;
  const bool prove_;
  std::optional<AvailableMemory> free_;
  std::optional<double> proof_bytes_;
  std::vector<Program> programs_;
  double program_bytes_ = 0;  // the size of the programs made so far
  int64_t pairs_ = 0;
  std::vector<PlanCost> forward_, backward_;
  Sent sent_;
  std::optional<Proof> proof_;
  double made_ = 0, proved_ = 0;
};

// Raises Error(kPlan) if the request is invalid, or has an adaptive pattern and so no plan before a call.
void require_plannable(const PlanRequest& request);

}  // namespace annulus
