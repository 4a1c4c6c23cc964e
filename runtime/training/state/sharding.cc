// See sharding.h.
#include "runtime/training/state/sharding.h"

#include <ATen/OpMathType.h>

#include <algorithm>

#include "comm/hosts.h"
#include "comm/rank_order.h"
#include "common/error.h"
#include "common/text.h"
#include "runtime/training/state/state_tier.h"

namespace annulus {

Sharding make_sharding(const Config& c, int ranks, int ranks_of_a_host) {
  Sharding sharding{.level = static_cast<int>(c.optimizer.shard), .shards = ranks, .replicas = 1};
  if (c.optimizer.shard_within == "host") {
    if (ranks_of_a_host < 1 || ranks % ranks_of_a_host != 0) {
      throw Error(ErrorKind::kPlan, "training",
                  "optimizer.shard_within = \"host\" needs the same number of ranks on every host, but of " +
                      counted(ranks, "rank") + " " + std::to_string(ranks_of_a_host) +
                      " are on one: start the same number on each, or set it to \"world\"");
    }
    sharding.shards = ranks_of_a_host;
    sharding.replicas = ranks / ranks_of_a_host;
  } else {
    sharding.groups = RankHosts::filled(ranks, ranks_of_a_host).groups().sizes();
  }
  if (sharding.shards == 1) sharding.level = 0;  // a shard is all there is
  return sharding;
}

std::vector<UnitRange> shard_ranges(const Parameters& parameters, int shards, int shard) {
  std::vector<UnitRange> ranges;
  for (size_t unit = 0; unit < parameters.units().size(); ++unit) {
    const int64_t each = parameters.units()[unit].elements / shards;
    ranges.push_back({unit, shard * each, (shard + 1) * each});
  }
  return ranges;
}

namespace {

// Returns the bytes that summing `bytes` by messages takes on the rank that holds the most.
int64_t summing_holds(const RankGroups& groups, int64_t bytes) {
  int64_t most = 0;
  for (int group = 0; group < groups.count(); ++group) {
    most = std::max(most, messages_hold(groups, groups.first(group), bytes));
  }
  return most;
}

// Returns the last place before the output, and its unit. A tied output has no unit of its own.
size_t last_of_layers(const Parameters& parameters, bool tied) { return parameters.units().size() - (tied ? 1 : 2); }

}  // namespace

std::vector<PlaceCharges> add_state_charges(const Parameters& parameters, bool tied, const StateTraits& t,
                                            StepCharges& step) {
  const auto e = static_cast<int64_t>(c10::elementSize(t.dtype));
  const auto wide = static_cast<int64_t>(c10::elementSize(at::toOpMathType(t.dtype)));
  const bool copies = e != wide, whole = t.sharding.whole_gradients(t.accumulate), gathered = t.sharding.level == 3;
  const int64_t all = parameters.elements(), own = t.sharding.level == 0 ? all : all / t.sharding.shards;
  // Where values lie in a tier, what is gathered is their shard in the leaves' dtype.
  const int64_t shard = copies && t.offloaded ? (gathered ? own * e : 0) : copies || gathered ? own * wide : 0;
  step.lasts({"weights", (gathered ? 0 : all * e) + shard, When::kLasts});
  step.lasts({"gradients", (whole ? all : own) * wide + (copies && t.recorded ? all * e : 0), When::kLasts});
  step.lasts({"optimizer", t.offloaded ? state_tier(parameters, t).buffers : 2 * own * wide, When::kLasts});

  const std::vector<ParameterUnit>& units = parameters.units();
  const size_t last = last_of_layers(parameters, tied), output = last + 1;  // places
  const auto elements = [&](size_t place) { return units[tied && place == output ? 0 : place].elements; };
  const Sharding& s = t.sharding;
  const RankGroups sharers(s.groups.empty() ? std::vector<int>{s.shards} : s.groups), replicas({s.replicas});
  // What a reduction in progress takes: sums that are not kept, and what the communicator holds.
  const auto reduction = [&](size_t place) {
    const int64_t sums = elements(place) * wide;
    return (whole ? 0 : sums) + (t.messages ? summing_holds(sharers, sums) : 0);
  };
  const auto between_replicas = [&](size_t place) {
    return t.messages ? summing_holds(replicas, elements(place) * wide / s.shards) : 0;
  };
  // Whether the gradients of leaves exist only during the backward of their place.
  const bool passing = copies ? !t.recorded : !whole;
  std::vector<PlaceCharges> charges(output + 1);
  for (size_t place = 0; place <= output; ++place) {
    PlaceCharges& charge = charges[place];
    if (gathered) {
      // The weights of the next place are gathered meanwhile; in the backward, those of the place before.
      if (place == last) charge.kept = elements(place) * e;
      if (place < output) charge.after = elements(place + 1) * e;
      charge.forward = (place == last ? 0 : elements(place)) * e + charge.after;
      if (place > 0 && place < last) charge.backward = elements(place) * e;
      if (place > 1 && place <= last) charge.backward += elements(place - 1) * e;
    }
    // The gradient of a tied output is held until the embedding adds its own.
    if (passing) charge.backward += (elements(place) + (tied && place > 0 && place < output ? elements(0) : 0)) * e;
    // The reduction of the following place is in progress until that of this place begins.
    if (place < last || (place == last && !tied)) charge.backward += reduction(place + 1);
    // The reduction between replicas of the place after that one is in progress, too.
    if (place + 1 < last || (place + 1 == last && !tied)) charge.backward += between_replicas(place + 2);
    // At the end the leaves' gradients are converted to sums.
    if (copies && !whole && !(tied && place == output)) {
      const bool before = gathered && place > 1 && place <= last;
      charge.ends = elements(place) * (e + wide) + (before ? elements(place - 1) * e : 0);
      if (place < last || (place == last && !tied)) charge.ends += between_replicas(place + 1);
    }
  }
  return charges;
}

StateTraffic state_traffic(const Parameters& parameters, const Sharding& s, bool tied, int64_t accumulate) {
  const double share = static_cast<double>(s.shards - 1) / s.shards;
  const std::vector<ParameterUnit>& units = parameters.units();
  double gathered = static_cast<double>(parameters.elements());
  if (s.level == 3) {
    if (tied) gathered += static_cast<double>(units[0].elements);
    // The weights that the backward reads first stay from the forward to it, so they are gathered once.
    for (size_t unit = 1; unit < last_of_layers(parameters, tied); ++unit)
      gathered += static_cast<double>(units[unit].elements);
    gathered *= static_cast<double>(accumulate);
  }
  return {share * static_cast<double>(parameters.elements()), share * gathered};
}

}  // namespace annulus
