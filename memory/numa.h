// Binds the calling thread's new memory, or the pages of a block of memory, to NUMA nodes, and reports where pages lie.
// Every rank binds its memory to the nodes local to its processors before it starts other threads
// (launcher/launch/rank_place.cc).
//
// Nodes have the kernel's numbers, as in launcher/topology/machine.h.
// Thread safety: bind_memory() affects only the calling thread, the others only the pages that they are given.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace annulus {

// Binds the calling thread's new memory to `nodes`, which must not be empty. Threads that it starts later inherit the
// binding, so call it at the start of main. Existing memory is not moved. Returns "" if the kernel reports the binding
// afterwards, and otherwise a message for the user: a refusal (frequent in containers) is no error, because it costs
// only speed. Raises Error(kInternal) for an impossible node number.
std::string bind_memory(const std::vector<int>& nodes);

// Binds the pages of mapped memory, which begins with a page, to `nodes`, whichever thread touches them first; pages
// that were touched already are not moved. Returns whether the kernel has done it. Raises Error(kInternal) for an
// impossible node number. Used by memory/pool.
bool bind_pages(void* memory, int64_t bytes, const std::vector<int>& nodes);
// Returns the nodes, ascending, on which the kernel reports touched pages of this memory; empty if it does not tell.
std::vector<int> nodes_of_pages(const void* memory, int64_t bytes);
// Returns the nodes, ascending, to which the page at this address is bound; empty if it is not bound, or if the kernel
// does not tell.
std::vector<int> nodes_bound_to(const void* memory);

}  // namespace annulus
