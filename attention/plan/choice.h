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
#include "comm/hosts.h"

namespace annulus {

// A way to run the request.
struct PlanCandidate {
  ScheduleKind schedule = ScheduleKind::kRing;
  int within = 0;
  LayoutKind layout = LayoutKind::kContiguous;
  std::string refused;         // why it cannot run, or does not fit; empty if it can be chosen
  RankTime forward, backward;  // of the rank that ends last; the backward is 0 if none follows
  double bytes = 0;            // held by the rank that holds most

  double seconds() const { return forward.seconds + backward.seconds; }
  std::string name() const;  // "ulysses-ring, within 8"
};

// As PlanTerms::memory: the schedules that hold the fewest bytes are to be chosen from, however much memory there is.
inline constexpr double kLeanest = -1;

struct PlanChoice {
  PlanRequest request;                    // with the schedule, `within` and layout that were chosen
  std::vector<PlanCandidate> candidates;  // the chosen one, then the others by their times, then those refused

  const PlanCandidate& chosen() const { return candidates.front(); }
  // One line: "ring, 2.1 ms predicted on h100 (...); group-cast takes 1.2 times as long; ulysses: 6 heads ...".
  std::string reason() const;
  // The same as a table, one line for each candidate.
  std::vector<std::string> lines() const;
};

// Chooses the schedule and `within` of a request with kAuto, and its layout among `layouts`; without any, its own. For
// another schedule there is one candidate. An adaptive pattern counts as if it kept the blocks nearest to the diagonal.
// Raises Error(kPlan) as validate does, and if no candidate fits the memory of the request's terms, with what would.
// Choices are kept in the cache "choices" (memory/caches.h).
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

struct LayoutChoice {
  LayoutKind layout = LayoutKind::kZigzag;
  std::string reason;  // one line: "zigzag, 2.1 ms predicted on h100; contiguous 3.4 ms; striped: a sequence ..."
};

// Chooses the layout of calls that share one: the layout in which all of them together are predicted to take the least
// time, each with its schedule, or with the one that `auto` takes there. `placed` returns the calls in a layout.
// `calls` names them in the reason ("all layers"), or is empty. Of layouts whose times differ by less than 2 % the
// first of layouts_of_auto() is taken; one rank has that in any case. Raises Error(kPlan) if no layout can be planned.
LayoutChoice choose_layout(const std::function<std::vector<RepeatedCall>(LayoutKind)>& placed, std::string_view calls);
// The same for one call.
LayoutChoice choose_layout(const PlanRequest& request);

// The terms of a request: the machine is found as find_machine does, where an empty name stands for that in
// ANNULUS_MACHINE, if it is set. Machines are read once in a process. Raises as find_machine does. Thread safe.
TermsPointer terms_of(const std::string& machine, std::string_view where, std::string_view device, int64_t head_dim,
                      int64_t element_bytes, bool backward = true);

// The same terms in a job whose ranks are on these hosts: each has as many consecutive ranks as it has, whatever the
// machine says. Hosts that differ, or whose ranks are not consecutive, leave the machine's number.
TermsPointer on_hosts(const TermsPointer& terms, const RankHosts& hosts);

// The same terms where attention may hold at most so many bytes on a rank, or as many as the machine has if that is
// less. Terms by which the leanest is taken stay as they are.
TermsPointer within_memory(const TermsPointer& terms, double bytes);

// Lets a request with kAuto that fits no memory have the leanest schedule instead of an error, for callers who know
// only what was free before. Raises as validate does. Cached as choices are.
void take_leanest_if_none_fits(PlanRequest& request);

// A number of seconds for people: "2.1 ms".
std::string seconds_text(double seconds);

}  // namespace annulus
