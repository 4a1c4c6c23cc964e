// Binds this process to the processors of a RankPlacement and reads back its affinity. bind_to_cpus is used by a rank
// of a launch (launcher/launch/rank_place.cc), current_cpus by `annulus doctor` and tests. memory/numa.h binds memory
// to NUMA nodes.
#pragma once

#include "launcher/topology/cpu_set.h"
#include "launcher/topology/placement.h"

namespace annulus {

// Binds all threads of this process to rank.cpus; threads created later inherit the binding. Errors: kPlan if the
// placement is for a machine other than this system (such as an XML file, for which hwloc would report success without
// binding); kResource if the kernel does not bind to exactly rank.cpus, for example because they are outside the
// process's cgroup. On error the binding is unchanged. Thread safety: one caller at a time.
void bind_to_cpus(const RankPlacement& rank);

// Returns the affinity of the calling thread. Errors: kUnavailable if the kernel does not report it.
CpuSet current_cpus();

}  // namespace annulus
