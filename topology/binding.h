// Binding: carries the processors of a RankPlacement out for this process, and asks the kernel what holds. Every rank
// calls bind_to_cpus before it makes its first thread; doctor and tests read current_cpus. The memory beside these
// processors is memory/numa.h's.
#pragma once

#include "topology/cpu_set.h"
#include "topology/placement.h"

namespace annulus {

// Binds all threads of this process to rank.cpus; threads made later inherit that. Errors: kPlan when the placement was
// made for a machine that is not this system (an XML: hwloc would claim success and do nothing); kResource when the
// kernel does not bind to exactly rank.cpus, as when they are outside the process's cgroup. After an error the binding
// is as before. Thread safety: one caller at a time.
void bind_to_cpus(const RankPlacement& rank);

// Where the calling thread may run, by the kernel's word. Errors: kUnavailable where it cannot say.
CpuSet current_cpus();

}  // namespace annulus
