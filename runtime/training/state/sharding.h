// Says how a model's state (its weights, gradients and the optimizer's moments) is divided among ranks. The state
// itself (model_state.h), the memory plan and fitting.cc use it.
//
// `shards` ranks share one copy of the state, and there are `replicas` such groups: rank r has shard r % shards of
// replica r / shards. The ranks of a replica are neighbours and so, with shard_within = "host", those of one host.
// Shard i of a unit (runtime/model/parameters.h) is the i-th of `shards` equal parts of it. Example: with 8 ranks, 4
// shards and 2 replicas, rank 5 has shard 1 of replica 1, like rank 1 of replica 0. The levels are the stages of ZeRO
// (arXiv 1910.02054).
#pragma once

#include <cstdint>
#include <vector>

#include "memory/charge.h"
#include "runtime/config/config.h"
#include "runtime/model/model.h"

namespace annulus {

struct Sharding {
  // What is sharded: 0: nothing; 1: the weights that are updated and the optimizer's moments; 2: gradients as well;
  // 3: everything.
  int level = 0;
  int shards = 1;
  int replicas = 1;
  // The numbers of ranks that sum inside their host first (comm/hosts.h, RankHosts::groups); empty: all are on one
  // host.
  std::vector<int> groups = {};

  int shard_of(int rank) const { return rank % shards; }
  int replica_of(int rank) const { return rank / shards; }
  // Whether gradients of all elements are kept between the backwards of a step. They are if a step accumulates several
  // backwards, because the gradients are reduced once, after the last.
  bool whole_gradients(int64_t accumulate) const { return level < 2 || accumulate > 1; }
};

// Returns the sharding of a configuration over `ranks` ranks, of which each host has `ranks_of_a_host` and the last one
// the rest. Raises Error(kPlan) if optimizer.shard_within is "host" and not every host has the same number.
Sharding make_sharding(const Config& config, int ranks, int ranks_of_a_host);

// Elements [begin, end) of a unit.
struct UnitRange {
  size_t unit = 0;
  int64_t begin = 0, end = 0;

  int64_t count() const { return end - begin; }
};
// Returns shard `shard` of each unit. `parameters` must have been laid out for `shards` parts.
std::vector<UnitRange> shard_ranges(const Parameters& parameters, int shards, int shard);

// The properties of the state that are the same on every rank.
struct StateTraits {
  at::ScalarType dtype = at::kFloat;  // of the leaves
  Sharding sharding;
  int64_t accumulate = 1;
  // Whether steps are recorded (runtime/training/step_graph.h), so that leaves and gradients keep their memory.
  bool recorded = false;
  bool messages = false;  // whether ranks exchange CPU tensors in messages, so that summing takes memory
  double weight_decay = 0;
  ParameterGroups groups = {};
  bool offloaded = false;  // whether moments, and values that are not leaves, lie in a tier (state_tier.h)
  // For forwards alone: nothing is updated. Values have the leaves' dtype, are not initialized, and have no gradients.
  bool inference = false;
};

// Declares the memory of the state on each rank (memory/charge.h). Adds what lasts to `step` as "weights", "gradients"
// and "optimizer", and returns what is taken in addition at each place of the model. `tied`: the output is the
// embedding.
std::vector<PlaceCharges> add_state_charges(const Parameters& parameters, bool tied, const StateTraits& traits,
                                            StepCharges& step);

// The number of elements that a rank sends in a step, on average over the shards, if gradients are reduced and weights
// gathered by algorithms that send no more than necessary. CommStats::collective_bytes_sent counts the same in bytes.
// What is sent between replicas is not included. `tied`: the output is the embedding.
struct StateTraffic {
  double reduced = 0;   // in the dtype of the sums
  double gathered = 0;  // in the dtype of the leaves, at level 0 in that of the sums
};
StateTraffic state_traffic(const Parameters& parameters, const Sharding& sharding, bool tied, int64_t accumulate);

}  // namespace annulus
