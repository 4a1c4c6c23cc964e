// Binds this process to the processors of a RankPlacement and reads back what the kernel allows. A rank of a launch
// (launcher/launch/rank_place.cc) calls bind_to_cpus; `annulus doctor` and tests call current_cpus. memory/numa.h binds
// memory to NUMA nodes.
#pragma once

#include "launcher/topology/cpu_set.h"
#include "launcher/topology/placement.h"

namespace annulus {

// Binds all threads of this process to rank.cpus; threads made later inherit the binding. Errors: kPlan if the
// placement was made for a machine other than this system (such as an XML file, for which hwloc would report success
// and do nothing); kResource if the kernel does not bind to exactly rank.cpus, for example because they are outside
// the process's cgroup. After an error the binding is as before. Thread safety: one caller at a time.
void bind_to_cpus(const RankPlacement& rank);

// Returns the processors on which the kernel lets the calling thread run. Errors: kUnavailable if it does not say.
CpuSet current_cpus();

}  // namespace annulus
