// How a model's state, its weights, gradients and optimizer's means, is cut over ranks. Used by the state itself
// (model_state.h), the memory plan, which asks before there is any, and checkpoints.
//
// `shards` ranks share one copy of the state and `replicas` such groups hold the same: rank r has shard r % shards of
// replica r / shards, which are neighbouring ranks and so those of a host. Of each unit (model/parameters.h) shard i is
// the i-th of `shards` equal parts. After ZeRO (arXiv 1910.02054), whose stages are the levels here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/config.h"
#include "memory/charge.h"
#include "model/model.h"

namespace annulus {

struct Sharding {
  int level = 0;  // 0: nothing is cut, 1: weights that are updated and the optimizer's means, 2: and gradients, 3: all
  int shards = 1;
  int replicas = 1;
  // How many ranks sum inside a host first (comm/hosts.h, RankHosts::groups); empty: all shards are on one.
  std::vector<int> groups = {};

  int shard_of(int rank) const { return rank % shards; }
  int replica_of(int rank) const { return rank / shards; }
  // Whether gradients of all elements are kept from one backward to the next. They are where backwards of a step are
  // added up, since they are reduced once, after the last.
  bool whole_gradients(int64_t accumulate) const { return level < 2 || accumulate > 1; }
};

// Of a configuration over `ranks` ranks of which each host has `ranks_of_a_host`, the last one the rest. Raises
// Error(kPlan) where the ranks of hosts are to share the state and not every host has as many.
Sharding make_sharding(const Config& config, int ranks, int ranks_of_a_host);

// Elements [begin, end) of a unit.
struct UnitRange {
  size_t unit = 0;
  int64_t begin = 0, end = 0;

  int64_t count() const { return end - begin; }
};
// Shard `shard` of each unit. `parameters` are laid out for as many parts as there are shards.
std::vector<UnitRange> shard_ranges(const Parameters& parameters, int shards, int shard);

// What is the same for every rank's state.
struct StateTraits {
  at::ScalarType dtype = at::kFloat;  // of the leaves
  Sharding sharding;
  int64_t accumulate = 1;
  bool recorded = false;  // steps are recorded (training/step_graph.h): leaves and their gradients stay where they are
  bool messages = false;  // ranks send each other messages of CPU tensors: then summing takes memory, too
  double weight_decay = 0;
  ParameterGroups groups = {};
};

// What the state takes on each rank (memory/charge.h): what lasts is added to `step` as "weights", "gradients" and
// "optimizer"; returned is what comes besides at each place of the model.
std::vector<PlaceCharges> add_state_charges(const Parameters& parameters, bool tied, const StateTraits& traits,
                                            StepCharges& step);

// Elements that a rank sends in a step, on average over the shards, where gradients are reduced and weights gathered by
// algorithms that send no more than they must: what CommStats::collective_bytes_sent counts, in elements of the leaves
// and of the sums. Those between replicas are not included. `tied`: the output is the embedding.
struct StateTraffic {
  double reduced = 0;   // of the sums' dtype
  double gathered = 0;  // of the leaves' dtype; at level 0 of the sums'
};
StateTraffic state_traffic(const Parameters& parameters, const Sharding& sharding, bool tied, int64_t accumulate);

}  // namespace annulus
