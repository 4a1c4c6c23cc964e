// Binds the calling thread's new memory to NUMA nodes, and verifies the binding. Every rank binds its memory to the
// nodes local to its processors before it starts other threads (launcher/launch/rank_place.cc).
//
// Nodes have the kernel's numbers, as in launcher/topology/machine.h.
// Thread safety: each call affects only the calling thread.
#pragma once

#include <string>
#include <vector>

namespace annulus {

// Binds the calling thread's new memory to `nodes`, which must not be empty. Threads that it starts later inherit the
// binding, so call it at the start of main. Existing memory is not moved. Returns "" if the kernel reports the binding
// afterwards, and otherwise a message for the user: a refusal (frequent in containers) is no error, because it costs
// only speed. Raises Error(kInternal) for an impossible node number.
std::string bind_memory(const std::vector<int>& nodes);

}  // namespace annulus
