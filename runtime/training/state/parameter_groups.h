// Determines the rates with which each parameter is updated, from optimizer.groups of a configuration and the defaults.
// model_state.cc uses it, and so does check_training (runtime/training/job.h), which refuses groups that match nothing.
#pragma once

#include <vector>

#include "runtime/config/config.h"
#include "runtime/model/parameters.h"
#include "runtime/training/state/optimizer.h"
#include "runtime/training/state/sharding.h"

namespace annulus {

// Returns the rates of each parameter, in the order of parameters.list(), which must have been laid out. The first
// group that matches a name gives its learning rate, and its weight decay if it has one. Otherwise matrices have
// `weight_decay` and vectors none. Raises Error(kUsage), which names the nearest parameters, for a group that is no
// parameter's first match.
std::vector<Rates> parameter_rates(const Parameters& parameters, double weight_decay, const ParameterGroups& groups);

// Returns the same by ranges of elements, counted from the beginning of `of`. Padding at the end of a unit has the
// rates of the parameter before it.
std::vector<RatedRange> rated_ranges(const Parameters& parameters, const std::vector<Rates>& rates,
                                     const UnitRange& of);

}  // namespace annulus
