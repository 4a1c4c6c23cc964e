// Which NUMA nodes memory comes from: binds the calling thread's new memory to nodes and asks the kernel what holds.
// Every rank binds beside its processors before it makes its first thread (launcher/launch/host_plan.cc); doctor and
// tests ask.
//
// Nodes are numbered as the system numbers them, as in topology/machine.h.
// Thread safety: each call concerns the calling thread alone.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace annulus {

// What the kernel says about the calling thread's new memory.
struct MemoryBinding {
  bool bound = false;      // it may come from `nodes` only
  std::vector<int> nodes;  // ascending; empty when it is not bound or the kernel would not tell
  bool operator==(const MemoryBinding&) const = default;
};

// Binds the calling thread's new memory to `nodes`, not empty; threads made by it later inherit that, so it belongs at
// the start of main. Memory that exists stays where it is. Returns what could not be had, in words to print; empty when
// the kernel says afterwards that it holds. A kernel that refuses (containers often do) is no error: such a process is
// slower, not wrong. Error(kInternal) for a number that can be no node's.
std::string bind_memory(const std::vector<int>& nodes);

MemoryBinding current_memory_binding();

// The NUMA node of the page at `address`, which must be readable; nothing when the kernel will not say.
std::optional<int> memory_node_of(const void* address);

}  // namespace annulus
