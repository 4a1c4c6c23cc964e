// What a plan costs each rank, and its proof, without running it: what `annulus plan` prints, and the operator
// torch.ops.annulus.plan returns.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "attention/plan/plan.h"
#include "attention/plan/verifier.h"
#include "memory/available.h"

namespace annulus {

// What one rank sends or holds in one direction, of all ranks the least and the most.
struct PlanCost {
  const char* key;
  const char* name;
  bool bytes;
  double least, most;
};

class PlanReport {
 public:
  // Of one that is done after the other, in words.
  using Say = std::function<void(const std::string&)>;

  // Makes the plan of all ranks. head_dim and element_bytes, 2 for bf16, make bytes of rows. `prove`: prove() will be
  // called. Raises Error(kPlan) where no such plan can be, for an adaptive pattern, too, whose blocks are not known
  // before a call, and Error(kResource) where plan or proof would not fit into the memory that is free.
  PlanReport(const PlanRequest& request, int64_t head_dim, int64_t element_bytes, bool prove, const Say& say);

  // Proves it, and returns whether it holds.
  const Proof& prove(const Say& say);

  // One object; "proof" is null before prove().
  std::string json() const;

  const PlanRequest& request() const { return request_; }  // with the schedule that `auto` stands for
  int64_t pairs() const { return pairs_; }
  double share() const;  // of all pairs of a query and a key
  const std::vector<PlanCost>& forward() const { return forward_; }
  const std::vector<PlanCost>& backward() const { return backward_; }
  double made_seconds() const { return made_; }
  double proved_seconds() const { return proved_; }

 private:
  void require_memory(double programs);

  PlanRequest request_;
  const bool prove_;
  std::optional<AvailableMemory> free_;
  std::optional<double> proof_bytes_;
  std::vector<Program> programs_;
  double program_bytes_ = 0;  // of the programs made so far
  int64_t pairs_ = 0;
  std::vector<PlanCost> forward_, backward_;
  std::optional<Proof> proof_;
  double made_ = 0, proved_ = 0;
};

// Raises Error(kPlan) for a request that has no plan before a call.
void require_plannable(const PlanRequest& request);

}  // namespace annulus
