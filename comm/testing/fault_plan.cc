// See fault_plan.h.
#include "comm/testing/fault_plan.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <utility>

#include "common/error.h"
#include "common/splitmix64.h"

namespace annulus::testing {
namespace {

constexpr std::array<const char*, 6> kKinds = {"delay",   "drop", "duplicate",
                                               "reorder", "kill", "stop"};  // as Fault::Kind

[[noreturn]] void refuse(std::string_view text, const std::string& why) {
  throw Error(
      ErrorKind::kUsage, "testing",
      "\"" + std::string(text) + "\" is not a plan of faults: " + why +
          "; expected for example \"kill:rank=1,nth=3\", \"delay:rank=0,nth=5,seconds=0.2\" or \"seed=7,within=20\"");
}

// Cuts off what stands before the first `mark`, without blanks around it.
std::string_view cut(std::string_view& rest, char mark) {
  const size_t end = std::min(rest.find(mark), rest.size());
  std::string_view word = rest.substr(0, end);
  rest.remove_prefix(std::min(rest.size(), end + 1));
  while (!word.empty() && word.front() == ' ') word.remove_prefix(1);
  while (!word.empty() && word.back() == ' ') word.remove_suffix(1);
  return word;
}

double number(std::string_view plan, std::string_view name, std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !(value >= 0 && value < 1e15)) {
    refuse(plan, std::string(name) + " is \"" + std::string(text) + "\", not a number");
  }
  return value;
}

int64_t whole(std::string_view plan, std::string_view name, std::string_view text, int64_t least) {
  const double value = number(plan, name, text);
  const auto rounded = static_cast<int64_t>(value);
  if (static_cast<double>(rounded) != value || rounded < least) {
    refuse(plan, std::string(name) + " is " + std::string(text) + ", not a whole number from " + std::to_string(least) +
                     " on");
  }
  return rounded;
}

}  // namespace

FaultPlan FaultPlan::drawn(uint64_t seed, int ranks, int64_t within, int count) {
  FaultPlan plan;
  uint64_t state = splitmix64(seed);
  const auto draw = [&](int64_t n) {
    state = splitmix64(state);
    return static_cast<int64_t>(state % static_cast<uint64_t>(n));
  };
  for (int i = 0; i < count; ++i) {
    Fault fault;
    fault.kind = static_cast<Fault::Kind>(draw(kKinds.size()));
    fault.rank = static_cast<int>(draw(ranks));
    fault.nth = 1 + draw(within);
    plan.faults.push_back(fault);
  }
  return plan;
}

FaultPlan FaultPlan::parse(std::string_view text, int ranks) {
  FaultPlan plan;
  for (std::string_view rest = text; !rest.empty();) {
    std::string_view one = cut(rest, ';');
    if (one.empty()) continue;
    Fault fault;
    const size_t colon = one.find(':');
    const bool seeded = colon == std::string_view::npos;
    if (!seeded) {
      const auto kind = std::find(kKinds.begin(), kKinds.end(), cut(one, ':'));
      if (kind == kKinds.end()) refuse(text, "the kinds are delay, drop, duplicate, reorder, kill and stop");
      fault.kind = static_cast<Fault::Kind>(kind - kKinds.begin());
    }
    int64_t seed = -1, within = 20, count = 1;
    bool has_rank = false;
    while (!one.empty()) {
      std::string_view value = cut(one, ',');
      const std::string_view name = cut(value, '=');
      if (seeded && name == "seed")
        seed = whole(text, name, value, 0);
      else if (seeded && name == "within")
        within = whole(text, name, value, 1);
      else if (seeded && name == "faults")
        count = whole(text, name, value, 1);
      else if (!seeded && name == "rank")
        fault.rank = static_cast<int>(whole(text, name, value, 0)), has_rank = true;
      else if (!seeded && name == "nth")
        fault.nth = whole(text, name, value, 1);
      else if (!seeded && name == "seconds" && fault.kind == Fault::Kind::kDelay)
        fault.seconds = number(text, name, value);
      else
        refuse(text, "\"" + std::string(name) + "\" means nothing here");
    }
    if (seeded) {
      if (seed < 0) refuse(text, "it has neither a kind nor a seed");
      const FaultPlan more = drawn(static_cast<uint64_t>(seed), ranks, within, static_cast<int>(count));
      plan.faults.insert(plan.faults.end(), more.faults.begin(), more.faults.end());
      continue;
    }
    if (!has_rank) refuse(text, "a fault needs a rank");
    if (fault.rank >= ranks) {
      refuse(text, "there is no rank " + std::to_string(fault.rank) + " among " + std::to_string(ranks));
    }
    plan.faults.push_back(fault);
  }
  return plan;
}

std::string FaultPlan::text() const {
  std::string text;
  for (const Fault& fault : faults) {
    text += (text.empty() ? "" : "; ") + std::string(kKinds[static_cast<size_t>(fault.kind)]) +
            ":rank=" + std::to_string(fault.rank) + ",nth=" + std::to_string(fault.nth);
    if (fault.kind != Fault::Kind::kDelay) continue;
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, "%.6g", fault.seconds);
    text += ",seconds=" + std::string(seconds);
  }
  return text;
}

FaultCounter::FaultCounter(FaultPlan plan, int rank) : mine_(std::move(plan.faults)) {
  mine_.erase(std::remove_if(mine_.begin(), mine_.end(), [&](const Fault& f) { return f.rank != rank; }), mine_.end());
}

FaultCounter::Now FaultCounter::next(bool sends) {
  ++calls_;
  sending_calls_ += sends ? 1 : 0;
  Now now;
  for (const Fault& fault : mine_) {
    if (fault.of_messages() ? !sends || fault.nth != sending_calls_ : fault.nth != calls_) continue;
    now.delay += fault.kind == Fault::Kind::kDelay ? fault.seconds : 0;
    now.kill = now.kill || fault.kind == Fault::Kind::kKill;
    now.stop = now.stop || fault.kind == Fault::Kind::kStop;
    now.drop = now.drop || fault.kind == Fault::Kind::kDrop;
    now.duplicate = now.duplicate || fault.kind == Fault::Kind::kDuplicate;
    now.reorder = now.reorder || fault.kind == Fault::Kind::kReorder;
  }
  return now;
}

}  // namespace annulus::testing
