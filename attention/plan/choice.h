// The choice of a plan by its predicted time, and why: what `auto` stands for. `annulus plan`, the log of a run,
// `attend` and the reports for Python say it. Thread safety: functions without state.
//
// Of each candidate the programs of all ranks are made, or, of more than 16, those of a few: the first, the last, those
// with the most work, and some between them. The steps that the schedules make are priced by the request's terms
// (time.h). Of those whose times differ by less than 2 % the one that holds the fewest bytes is taken. Every rank
// computes the same from the same request.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "attention/plan/plan.h"
#include "attention/plan/time.h"

namespace annulus {

// A way to run the request.
struct PlanCandidate {
  ScheduleKind schedule = ScheduleKind::kRing;
  int within = 0;
  LayoutKind layout = LayoutKind::kContiguous;
  std::string refused;         // why it cannot run, or does not fit; empty if it can be chosen
  RankTime forward, backward;  // of the rank that ends last; the backward is 0 if none follows
  double bytes = 0;            // held by the rank that holds most, with what calls of other layers keep

  double seconds() const { return forward.seconds + backward.seconds; }
  std::string name() const;  // "ulysses-ring, within 8"
};

struct PlanChoice {
  PlanRequest request;                    // with the schedule, `within` and layout that were chosen
  std::vector<PlanCandidate> candidates;  // the chosen one, then the others by their times, then those refused

  const PlanCandidate& chosen() const { return candidates.front(); }
  // One line: "ring, 2.1 ms predicted on h100 (...); group-cast takes 1.2 times as long; ulysses: 6 heads ...".
  std::string reason() const;
  // The same as a table, one line for each candidate.
  std::vector<std::string> lines() const;
  // Refuses the chosen candidate, because of what only the caller knows. Returns false, and changes nothing, if no
  // other one could be chosen in its place.
  bool refuse(std::string why);
};

// Chooses the schedule and `within` of a request with kAuto, and its layout among `layouts`; without any, its own. For
// another schedule there is one candidate. An adaptive pattern counts as if it kept the blocks nearest to the diagonal.
// Raises Error(kPlan) as validate does, and if no candidate fits the memory of the request's terms, with what would.
// What candidates take is kept in the cache "choices" (memory/caches.h), for all bounds of memory.
PlanChoice choose_plan(const PlanRequest& request, const std::vector<LayoutKind>& layouts = {});
// The same for the slices of a pattern, as make_program takes them.
PlanChoice choose_plan(const PlanRequest& request, const Pattern& pattern, const std::vector<LayoutKind>& layouts = {});

// What users write where they name a layout, for the one that is predicted to take least time, and the layouts that are
// compared for it.
inline constexpr std::string_view kAutoLayout = "auto";
const std::vector<LayoutKind>& layouts_of_auto();
const std::vector<std::string>& layout_names_or_auto();
// As parse_layout; nullopt for `auto`.
std::optional<LayoutKind> parse_layout_or_auto(std::string_view name, std::string_view where);

// Calls that are made `times` times.
struct RepeatedCall {
  PlanRequest request;
  int64_t times = 1;
};

// Calls that share a layout, in each of the layouts that are compared for them, with the plans that are chosen there.
class CallsChoice {
 public:
  struct InLayout {
    LayoutKind layout = LayoutKind::kZigzag;
    std::string refused;            // why the calls cannot have this layout; empty if they can
    std::vector<PlanChoice> plans;  // by call; none for one rank, which has the first layout
    double seconds = 0;             // that all calls take
  };

  // `placed` returns the calls in a layout; `calls` names them in the reason ("all layers"), or is empty. Raises
  // Error(kPlan) if no layout can be planned.
  CallsChoice(const std::function<std::vector<RepeatedCall>(LayoutKind)>& placed,
              const std::vector<LayoutKind>& layouts, std::string calls);

  // The layout in which the calls take the least time; of several whose times differ by less than 2 %, the first.
  const InLayout& best() const { return layouts_[best_]; }
  // Refuses, of the plans of best(), the one that holds the most of those that have another in their place, or else the
  // layout. Returns false, and changes nothing, if no other layout is left.
  bool refuse(const std::string& why);
  // Why best() is the layout, in one line: "zigzag, 2.1 ms predicted on h100; contiguous 3.4 ms; striped: ...".
  std::string reason() const;

 private:
  void find_best();
  void add_seconds(InLayout& of) const;

  std::string calls_;
  std::vector<int64_t> times_;
  std::vector<InLayout> layouts_;
  size_t best_ = 0;
  bool one_rank_ = false;  // nothing is compared
};

struct LayoutChoice {
  LayoutKind layout = LayoutKind::kZigzag;
  std::string reason;  // one line: "zigzag, 2.1 ms predicted on h100; contiguous 3.4 ms; striped: a sequence ..."
};

// Chooses the layout of calls that share one, of layouts_of_auto(): that of CallsChoice::best(), whose arguments it
// takes.
LayoutChoice choose_layout(const std::function<std::vector<RepeatedCall>(LayoutKind)>& placed, std::string_view calls);
// The same for one call.
LayoutChoice choose_layout(const PlanRequest& request);

}  // namespace annulus
