// Chooses plans by their predicted time; see choice.h.
#include "attention/plan/choice.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <utility>

#include "attention/plan/balance.h"
#include "attention/plan/needs.h"
#include "attention/plan/schedules.h"
#include "common/error.h"
#include "common/names.h"
#include "common/text.h"
#include "memory/caches.h"

namespace annulus {
namespace {

constexpr int kAllRanks = 16;   // of up to so many ranks all programs are made
constexpr int kSomeRanks = 8;   // otherwise those of so many
constexpr int kManyRanks = 64;  // of more ranks only programs that are made quickly are compared

// Predictions are not exact: of candidates whose times differ by less than this share, the one that holds the fewest
// bytes is taken.
constexpr double kAlike = 0.02;

// The candidates for one layout, in the order in which equal times are decided.
std::vector<PlanCandidate> candidates_of(const PlanRequest& request) {
  using K = ScheduleKind;
  std::vector<PlanCandidate> all;
  const auto add = [&](K schedule, int within) {
    PlanCandidate candidate;
    candidate.schedule = schedule;
    candidate.within = within;
    candidate.layout = request.layout;
    const auto same = [&](const PlanCandidate& c) { return c.schedule == schedule && c.within == within; };
    if (std::none_of(all.begin(), all.end(), same)) all.push_back(std::move(candidate));
  };
  if (request.schedule != K::kAuto) {
    add(request.schedule, request.within);
    return all;
  }
  const int host = request.terms->machine.on_a_host(request.ranks);
  const bool hosts = host < request.ranks && request.ranks % host == 0;
  if (request.ranks == 1) {
    add(K::kRing, 0);
    return all;
  }
  if (request.within > 0) {  // among the schedules that have groups
    for (const K schedule : {K::kGroupCast, K::kDoubleRing, K::kUlysses, K::kUlyssesRing, K::kMesh}) {
      add(schedule, request.within);
    }
    return all;
  }
  if (request.ranks > kManyRanks) {
    for (const K schedule : {K::kGroupCast, K::kRing}) add(schedule, 0);
    return all;
  }
  for (const K schedule : {K::kGroupCast, K::kRing, K::kAllGather}) add(schedule, 0);
  if (hosts) add(K::kGroupCast, host);
  if (hosts) add(K::kDoubleRing, host);
  add(K::kUlysses, 0);
  if (hosts) add(K::kUlysses, host);
  // Inner groups among which the heads can be divided; that others are refused shows in `ulysses`.
  const auto most = static_cast<int>(std::min<int64_t>(hosts ? host : request.ranks - 1, request.shape.heads));
  for (int within = most; within > 1; --within) {
    if (request.ranks % within != 0 || (hosts && host % within != 0) || request.shape.heads % within != 0) continue;
    add(K::kUlyssesRing, within);
  }
  add(K::kMesh, 0);
  if (hosts) add(K::kMesh, host);
  return all;
}

// The pairs of each rank's queries.
std::vector<double> work_of_ranks(Needs& needs) {
  std::vector<double> work;
  for (int rank = 0; rank < needs.ranks(); ++rank) {
    double pairs = 0;
    for (const QueryPart& part : needs.parts(rank)) {
      Slice slice = *part.slice;
      slice.queries = part.queries;
      slice.mask = -1;
      pairs += static_cast<double>(count_pairs({.shape = {}, .slices = {slice}}));
    }
    work.push_back(pairs);
  }
  return work;
}

std::vector<int> ranks_to_look_at(Needs& needs) {
  const int P = needs.ranks();
  std::vector<int> ranks(static_cast<size_t>(P));
  std::iota(ranks.begin(), ranks.end(), 0);
  if (P <= kAllRanks) return ranks;
  const std::vector<double> work = work_of_ranks(needs);
  std::stable_sort(ranks.begin(), ranks.end(),
                   [&](int a, int b) { return work[static_cast<size_t>(a)] > work[static_cast<size_t>(b)]; });
  std::vector<int> some(ranks.begin(), ranks.begin() + 2);
  for (int i = 0; i < kSomeRanks - 2; ++i) some.push_back(static_cast<int>(int64_t{i} * (P - 1) / (kSomeRanks - 3)));
  std::sort(some.begin(), some.end());
  some.erase(std::unique(some.begin(), some.end()), some.end());
  return some;
}

// What a call keeps of other ranks' rows for its backward.
double bytes_kept(const Program& program, const RowBytes& bytes) {
  if (program.saved < 0) return 0;
  return static_cast<double>(program.buffers[static_cast<size_t>(program.saved)].rows.rows() *
                             bytes.of(BufferKind::kSavedKV, false));
}

// A candidate and what its ranks hold: in one call, and of a call for its backward.
struct Priced {
  PlanCandidate candidate;
  std::vector<std::pair<double, double>> held;  // by rank; none if it was refused before
  double bytes(int64_t layers) const {
    double most = 0;
    for (const auto& [call, kept] : held) most = std::max(most, call + static_cast<double>(layers - 1) * kept);
    return most;
  }
};
using AllPriced = std::vector<Priced>;

// Predicts times and memory of one candidate.
void price(Priced& priced, const PlanRequest& request, Needs& needs, const Layout& queries, const Layout& keys,
           const std::vector<int>& ranks) {
  const PlanTerms& terms = *request.terms;
  const RowBytes bytes{terms.head_dim, terms.element_bytes};
  std::vector<RankSteps> forward, backward;
  for (const int rank : ranks) {
    const Program program = program_of(request, needs, queries, keys, rank);
    forward.push_back({rank, step_costs(program, false, terms.machine, bytes)});
    priced.held.emplace_back(bytes_held(program, false, bytes), 0);
    if (!terms.backward) continue;
    backward.push_back({rank, step_costs(program, true, terms.machine, bytes)});
    auto& [call, kept] = priced.held.back();
    call = std::max(call, bytes_held(program, true, bytes)), kept = bytes_kept(program, bytes);
  }
  priced.candidate.forward = slowest(sweep(forward, request.ranks, terms.machine));
  priced.candidate.backward = slowest(sweep(backward, request.ranks, terms.machine));
}

// Puts the chosen one first, then the others by their times, then those refused.
void sort_candidates(std::vector<PlanCandidate>& candidates) {
  std::stable_sort(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) {
    if (a.refused.empty() != b.refused.empty()) return a.refused.empty();
    return a.refused.empty() && a.seconds() < b.seconds();
  });
  const double most = candidates.front().seconds() * (1 + kAlike);
  const auto past = std::find_if(candidates.begin(), candidates.end(),
                                 [&](const PlanCandidate& c) { return !c.refused.empty() || c.seconds() > most; });
  const auto chosen =
      std::min_element(candidates.begin(), past, [](const auto& a, const auto& b) { return a.bytes < b.bytes; });
  std::rotate(candidates.begin(), chosen, chosen == past ? chosen : chosen + 1);
}

void refuse_all_but_the_leanest(std::vector<PlanCandidate>& candidates) {
  double least = std::numeric_limits<double>::infinity();
  for (const PlanCandidate& c : candidates) {
    if (c.refused.empty()) least = std::min(least, c.bytes);
  }
  for (PlanCandidate& c : candidates) {
    if (c.refused.empty() && c.bytes > (1 + kAlike) * least) {
      c.refused = "holds " + rounded(c.bytes / least, 2) + " times as much as the leanest";
    }
  }
}

[[noreturn]] void refuse_all(const PlanRequest& request, const std::vector<PlanCandidate>& candidates) {
  const PlanCandidate* least = nullptr;
  for (const PlanCandidate& c : candidates) {
    if (c.bytes > 0 && (least == nullptr || c.bytes < least->bytes)) least = &c;
  }
  if (least == nullptr) throw Error(ErrorKind::kPlan, "plan", candidates.front().refused);
  const double most = request.terms->most_bytes();
  const bool free = request.terms->memory > 0;
  throw Error(
      ErrorKind::kPlan, "plan",
      (request.schedule == ScheduleKind::kAuto ? "no schedule fits" : least->name() + " does not fit") +
          (free ? " the memory that is free" : " the memory of " + request.terms->machine.name) + ": with " +
          least->name() + " " + (request.schedule == ScheduleKind::kAuto ? "a rank holds least, " : "a rank holds ") +
          bytes_text(least->bytes) + ", and " + (free ? "" : "it has ") + bytes_text(most) + (free ? " are free" : "") +
          (request.schedule == ScheduleKind::kAuto
               ? "; use about " + counted(static_cast<int64_t>(least->bytes / most * request.ranks) + 1, "rank") +
                     ", or a shorter sequence"
               : "; use schedule auto, which chooses among those that fit, or more ranks"));
}

std::string parts_text(const PlanCandidate& c) {
  const double compute = c.forward.compute + c.backward.compute;
  const double exposed = c.forward.exposed + c.backward.exposed, waiting = c.forward.latency + c.backward.latency;
  return "compute " + seconds_text(compute) + ", exposed transfers " + seconds_text(exposed - waiting) +
         ", latency and waiting " + seconds_text(waiting);
}

std::string against(const PlanCandidate& c, const PlanCandidate& best) {
  const double ratio = best.seconds() > 0 ? c.seconds() / best.seconds() : 1;
  const std::string text =
      std::abs(ratio - 1) < 0.005 ? "takes as long" : "takes " + rounded(ratio, 2) + " times as long";
  if (ratio > 1 + kAlike || c.bytes <= best.bytes) return text;
  return text + " and holds " + rounded(c.bytes / best.bytes, 2) + " times as much";
}

}  // namespace

std::string PlanCandidate::name() const {
  return std::string(to_string(schedule)) + (within > 0 ? ", within " + std::to_string(within) : "");
}

namespace {

struct ChoiceKey {
  PlanRequest request;
  std::vector<LayoutKind> layouts;

  uint64_t hash() const {
    return request.shape.hash() ^ request.pattern.hash() ^ static_cast<uint64_t>(request.ranks) << 32;
  }
  int64_t bytes() const {
    return static_cast<int64_t>(sizeof *this) + request.pattern.bytes(/*maps=*/false) +
           (request.balance_by ? request.balance_by->bytes(/*maps=*/false) : 0);
  }
  friend bool operator==(const ChoiceKey&, const ChoiceKey&) = default;
};

int64_t bytes_of_prices(const AllPriced& all) {
  int64_t bytes = static_cast<int64_t>(sizeof all);
  for (const Priced& p : all) {
    bytes += static_cast<int64_t>(sizeof p + p.candidate.refused.size() + p.held.size() * sizeof p.held[0]);
  }
  return bytes;
}

// Sorts the candidates, and lets the request have what the chosen one is.
void take_first(PlanChoice& choice) {
  sort_candidates(choice.candidates);
  choice.request.schedule = choice.chosen().schedule;
  choice.request.within = choice.chosen().within;
  choice.request.layout = choice.chosen().layout;
}

// Prices all candidates, whatever memory there is and however many layers keep something.
AllPriced price_all(const PlanRequest& request, const Pattern& pattern, const std::vector<LayoutKind>& layouts) {
  AllPriced all;
  for (const LayoutKind layout : layouts.empty() ? std::vector{request.layout} : layouts) {
    PlanRequest placed = request;
    placed.layout = layout;
    std::vector<PlanCandidate> candidates = candidates_of(placed);
    try {
      validate(placed);
    } catch (const Error& error) {  // lengths that this layout cannot divide evenly
      if (layouts.size() < 2) throw;
      candidates.front().refused = error.message();
      all.push_back({std::move(candidates.front()), {}});
      continue;
    }
    const Layout queries = query_layout(placed), keys = key_layout(placed);
    Needs needs(pattern, queries, keys);
    const std::vector<int> ranks = ranks_to_look_at(needs);
    for (PlanCandidate& candidate : candidates) {
      placed.schedule = candidate.schedule;
      placed.within = candidate.within;
      Priced& priced = all.emplace_back(Priced{std::move(candidate), {}});
      try {
        if (request.schedule == ScheduleKind::kAuto)
          priced.candidate.refused = why_bits_lack(pattern.masks, placed, ranks);
        if (priced.candidate.refused.empty()) price(priced, placed, needs, queries, keys, ranks);
      } catch (const Error& error) {
        if (error.kind() != ErrorKind::kPlan || request.schedule != ScheduleKind::kAuto) throw;
        priced.candidate.refused = error.message();
        priced.held.clear();
      }
    }
  }
  return all;
}

// Compares the candidates by the request's terms. If none can be chosen, the first one is refused. `priced` returns
// what price_all() does.
template <typename Prices>
PlanChoice compare(const PlanRequest& request, const std::vector<LayoutKind>& layouts, const Prices& priced) {
  const PlanTerms& terms = *request.terms;
  const double most = terms.memory == kLeanest ? 0 : terms.most_bytes();
  PlanChoice choice;
  bool any = false;
  // One rank sends nothing, so there is nothing to compare, unless something bounds what it holds.
  const bool alone = request.ranks == 1 && layouts.size() <= 1 && terms.most_bytes() == 0;
  const auto all =
      alone ? std::make_shared<const AllPriced>(AllPriced{{candidates_of(request).front(), {}}}) : priced();
  for (const Priced& one : *all) {
    PlanCandidate& c = choice.candidates.emplace_back(one.candidate);
    c.bytes = one.bytes(terms.layers);
    any = any || (c.refused.empty() && (most == 0 || c.bytes <= most));
  }
  const bool leanest = terms.memory == kLeanest || (terms.or_leanest && !any);
  for (PlanCandidate& c : choice.candidates) {
    if (leanest || !c.refused.empty() || most == 0 || c.bytes <= most) continue;
    c.refused = "a rank would hold " + bytes_text(c.bytes) + ", " + bytes_text(c.bytes - most) + " more than the " +
                bytes_text(most) + (terms.memory > 0 ? " that are free" : " that it has on " + terms.machine.name);
  }
  if (leanest) refuse_all_but_the_leanest(choice.candidates);
  choice.request = request;
  take_first(choice);
  return choice;
}

PlanChoice cached_comparison(const PlanRequest& request, const std::vector<LayoutKind>& layouts) {
  static auto& cache = *new NamedCache<AllPriced, ChoiceKey>("choices");  // never destroyed, as cached_pattern's
  validate(request);
  return compare(request, layouts, [&] {
    PlanRequest known = request;
    if (is_adaptive(request.pattern)) {
      known.pattern = with_nearest_blocks(with_causal_members(request.pattern), request.shape);
    }
    // The same prices serve all bounds of memory and numbers of layers.
    PlanTerms terms = *request.terms;
    terms.memory = 0, terms.layers = 1, terms.or_leanest = false;
    known.terms = std::move(terms);
    const auto make = [&] { return price_all(known, *cached_pattern(known), layouts); };
    return cache.get({known, layouts}, make, bytes_of_prices);
  });
}

}  // namespace

PlanChoice choose_plan(const PlanRequest& request, const std::vector<LayoutKind>& layouts) {
  PlanChoice choice = cached_comparison(request, layouts);
  if (!choice.chosen().refused.empty()) refuse_all(request, choice.candidates);
  return choice;
}

PlanChoice choose_plan(const PlanRequest& request, const Pattern& pattern, const std::vector<LayoutKind>& layouts) {
  PlanChoice choice = compare(request, layouts,
                              [&] { return std::make_shared<const AllPriced>(price_all(request, pattern, layouts)); });
  if (!choice.chosen().refused.empty()) refuse_all(request, choice.candidates);
  return choice;
}

const std::vector<LayoutKind>& layouts_of_auto() {
  static const std::vector<LayoutKind> layouts = {LayoutKind::kZigzag, LayoutKind::kContiguous, LayoutKind::kStriped,
                                                  LayoutKind::kBalanced, LayoutKind::kPerDocument};
  return layouts;
}

const std::vector<std::string>& layout_names_or_auto() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all = layout_names();
    all.emplace_back(kAutoLayout);
    return all;
  }();
  return names;
}

std::optional<LayoutKind> parse_layout_or_auto(std::string_view name, std::string_view where) {
  const size_t index = index_of_name(name, layout_names_or_auto(), "layout", where);
  if (index == layout_names().size()) return std::nullopt;
  return static_cast<LayoutKind>(index);
}

CallsChoice::CallsChoice(const std::function<std::vector<RepeatedCall>(LayoutKind)>& placed,
                         const std::vector<LayoutKind>& layouts, std::string calls)
    : calls_(std::move(calls)) {
  for (const LayoutKind layout : layouts) {
    InLayout& of = layouts_.emplace_back(InLayout{layout, "", {}, 0});
    try {
      std::vector<int64_t> times;
      for (const RepeatedCall& call : placed(layout)) {
        one_rank_ = one_rank_ || call.request.ranks == 1;
        if (one_rank_) return;  // any layout will do
        times.push_back(call.times);
        of.plans.push_back(choose_plan(call.request));
      }
      times_ = std::move(times);
    } catch (const Error& error) {  // lengths that this layout cannot divide evenly, or a schedule that does not fit it
      if (error.kind() != ErrorKind::kPlan) throw;
      of.refused = error.message();
    }
    if (of.refused.empty()) add_seconds(of);
  }
  find_best();
  if (best().refused.empty()) return;
  throw Error(ErrorKind::kPlan, "plan",
              layouts.size() == 1 ? best().refused : "layout auto: no layout can be planned: " + best().refused);
}

void CallsChoice::add_seconds(InLayout& of) const {
  of.seconds = 0;
  for (size_t i = 0; i < of.plans.size(); ++i) {
    of.seconds += static_cast<double>(times_[i]) * of.plans[i].chosen().seconds();
  }
}

void CallsChoice::find_best() {
  best_ = 0;
  for (size_t i = 1; i < layouts_.size(); ++i) {
    if (!layouts_[i].refused.empty()) continue;
    if (!best().refused.empty() || layouts_[i].seconds * (1 + kAlike) < best().seconds) best_ = i;
  }
}

bool CallsChoice::refuse(const std::string& why) {
  InLayout& of = layouts_[best_];
  std::vector<PlanChoice*> plans;
  for (PlanChoice& plan : of.plans) plans.push_back(&plan);
  std::stable_sort(plans.begin(), plans.end(),
                   [](const auto* a, const auto* b) { return a->chosen().bytes > b->chosen().bytes; });
  bool other = false;
  for (PlanChoice* plan : plans) other = other || plan->refuse(why);
  if (!other) {
    of.refused = why;
    const size_t was = best_;
    find_best();
    if (!best().refused.empty()) {
      of.refused.clear(), best_ = was;
      return false;
    }
    return true;
  }
  add_seconds(of);
  find_best();
  return true;
}

std::string CallsChoice::reason() const {
  const std::string name(to_string(best().layout));
  if (one_rank_) return name + ": one rank, nothing is sent";
  std::string reason = name + ", " + seconds_text(best().seconds) + " predicted " +
                       (calls_.empty() ? "" : "for " + calls_ + " ") + "on " +
                       best().plans.front().request.terms->machine.name;
  for (const InLayout& other : layouts_) {
    if (&other == &best()) continue;
    reason += "; " + std::string(to_string(other.layout)) +
              (other.refused.empty() ? " " + seconds_text(other.seconds) : ": " + other.refused);
  }
  return reason;
}

LayoutChoice choose_layout(const std::function<std::vector<RepeatedCall>(LayoutKind)>& placed, std::string_view calls) {
  const CallsChoice choice(placed, layouts_of_auto(), std::string(calls));
  return {choice.best().layout, choice.reason()};
}

LayoutChoice choose_layout(const PlanRequest& request) {
  return choose_layout(
      [&](LayoutKind layout) {
        PlanRequest placed = request;
        placed.layout = layout;
        return std::vector<RepeatedCall>{{std::move(placed), 1}};
      },
      "");
}

bool PlanChoice::refuse(std::string why) {
  if (candidates.size() < 2 || !candidates[1].refused.empty()) return false;
  candidates.front().refused = std::move(why);
  take_first(*this);
  return true;
}

std::string PlanChoice::reason() const {
  const PlanCandidate& best = chosen();
  if (request.ranks == 1) return best.name() + ": one rank, nothing is sent";
  std::string text = best.name() + ", " + seconds_text(best.seconds()) + " predicted on " +
                     request.terms->machine.name + " (" + parts_text(best) + ")";
  const bool one_layout = std::all_of(candidates.begin(), candidates.end(),
                                      [&](const PlanCandidate& c) { return c.layout == best.layout; });
  for (size_t i = 1; i < candidates.size(); ++i) {
    const PlanCandidate& c = candidates[i];
    text += "; " + c.name() + (one_layout ? "" : " over " + std::string(to_string(c.layout))) +
            (c.refused.empty() ? " " + against(c, best) : ": " + c.refused);
  }
  return text;
}

std::vector<std::string> PlanChoice::lines() const {
  std::vector<std::string> lines;
  const PlanCandidate& best = chosen();
  size_t width = 0;
  const auto title = [](const PlanCandidate& c) { return c.name() + ", " + std::string(to_string(c.layout)); };
  for (const PlanCandidate& c : candidates) width = std::max(width, title(c).size());
  for (const PlanCandidate& c : candidates) {
    std::string line = title(c);
    line.resize(width + 2, ' ');
    if (!c.refused.empty()) {
      lines.push_back(line + "refused: " + c.refused);
      continue;
    }
    line += seconds_text(c.seconds());
    line.resize(std::max(line.size() + 1, width + 13), ' ');
    lines.push_back(line + "(" + parts_text(c) + "; holds " + bytes_text(c.bytes) + ")  " +
                    (&c == &best ? "chosen" : against(c, best)));
  }
  return lines;
}

}  // namespace annulus
