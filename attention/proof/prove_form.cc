// Proves plans in the JSON form, and compares what they hold with what they say; see plan_form.h.
#include "attention/plan/traffic.h"
#include "attention/proof/form_keys.h"
#include "attention/proof/plan_form.h"
#include "common/text.h"

namespace annulus {

HeldRows held_rows(const Program& program) {
  HeldRows held;
  for (const DirectionKey& d : kDirectionKeys) {
    const Traffic found = traffic(program, program.*d.steps);
    for (const HeldKey& k : kHeldKeys) held.*d.held.*k.said = found.*k.peak;
  }
  return held;
}

Proof prove(const PlanForm& form, int max_faults, const std::function<void(int)>& proved) {
  Proof proof = verify(form.programs, *form.pattern, form.queries, form.keys, max_faults, proved);
  if (!proof.holds()) return proof;  // what a wrong program holds means nothing
  for (const Program& program : form.programs) {
    const HeldRows &said = form.held[static_cast<size_t>(program.rank)], held = held_rows(program);
    for (const DirectionKey& d : kDirectionKeys) {
      for (const HeldKey& k : kHeldKeys) {
        const std::optional<int64_t>&claim = said.*d.held.*k.said, &found = held.*d.held.*k.said;
        if (!claim || claim == found || proof.faults.size() >= static_cast<size_t>(max_faults)) continue;
        proof.faults.push_back("rank " + std::to_string(program.rank) + ", " + d.key + ": holds at most " +
                               with_commas(*found, "row") + " of " + k.of + ", not the " + with_commas(*claim) +
                               " that the plan says");
      }
    }
  }
  return proof;
}

}  // namespace annulus
