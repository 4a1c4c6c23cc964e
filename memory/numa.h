// Binds the calling thread's new memory to NUMA nodes, and checks that the kernel reports the binding. Every rank binds
// its memory to the nodes beside its processors before it starts other threads (launcher/launch/rank_place.cc).
//
// Nodes have the numbers of the system, as in launcher/topology/machine.h.
// Thread safety: each call affects only the calling thread.
#pragma once

#include <string>
#include <vector>

namespace annulus {

// Binds the calling thread's new memory to `nodes`, which must not be empty. Threads that it starts later inherit the
// binding, so call it at the start of main. Memory that exists already stays where it is. Returns an empty text if the
// kernel reports the binding afterwards, and otherwise a message for the user. If the kernel refuses (as it often does
// in containers), that is not an error: the process is slower, but its results are right. Raises Error(kInternal) for a
// number that no node can have.
std::string bind_memory(const std::vector<int>& nodes);

}  // namespace annulus
