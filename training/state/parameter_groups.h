// Which rates each parameter is updated with: optimizer.groups of a configuration, and what holds without them. Used by
// model_state.cc, and by check_training (training/job.h), which refuses groups that mean nothing.
#pragma once

#include <vector>

#include "config/config.h"
#include "model/parameters.h"
#include "training/state/optimizer.h"
#include "training/state/sharding.h"

namespace annulus {

// Of each parameter of the list, which has been laid out. The first group that matches a name counts: its learning
// rate, and its weight decay where it says one. Without, matrices have `weight_decay` and vectors none. Raises
// Error(kUsage) for a group that no parameter follows, with the nearest names.
std::vector<Rates> parameter_rates(const Parameters& parameters, double weight_decay, const ParameterGroups& groups);

// The same by elements, counted from the beginning of `of`. What fills a unit up has the rates of what is before it.
std::vector<RatedRange> rated_ranges(const Parameters& parameters, const std::vector<Rates>& rates,
                                     const UnitRange& of);

}  // namespace annulus
