// Which NUMA nodes memory comes from: binds the calling thread's new memory to nodes and sees that the kernel says so.
// Every rank binds beside its processors before it makes its first thread (launcher/launch/rank_place.cc).
//
// Nodes are numbered as the system numbers them, as in topology/machine.h.
// Thread safety: each call concerns the calling thread alone.
#pragma once

#include <string>
#include <vector>

namespace annulus {

// Binds the calling thread's new memory to `nodes`, not empty; threads made by it later inherit that, so it belongs at
// the start of main. Memory that exists stays where it is. Returns what could not be had, in words to print; empty when
// the kernel says afterwards that it holds. A kernel that refuses (containers often do) is no error: such a process is
// slower, not wrong. Error(kInternal) for a number that can be no node's.
std::string bind_memory(const std::vector<int>& nodes);

}  // namespace annulus
