// Binding: carries a RankPlacement out for this process, and asks the kernel what holds. Every rank calls
// bind_this_process before it makes its first thread; doctor and tests read current_binding.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "comm/topology/cpu_set.h"
#include "comm/topology/placement.h"

namespace annulus {

// What the kernel says about the calling thread.
struct Binding {
  CpuSet cpus;                    // where it may run
  bool memory_bound = false;      // its new memory may come from memory_nodes only
  std::vector<int> memory_nodes;  // as the system numbers them, ascending; empty when the kernel would not tell
};

struct BindingResult {
  Binding binding;                    // what the kernel reported afterwards; its cpus equal the placement's
  std::vector<std::string> warnings;  // what could not be had, in words to print
};

// Binds all threads of this process to rank.cpus and the calling thread's memory to rank.memory_nodes; threads made by
// it later inherit both, so it belongs at the start of main. Memory that exists stays where it is. A kernel that
// refuses memory binding (containers often do) is a warning. Errors: kPlan when the placement was made for a machine
// that is not this system (an XML: hwloc would claim success and do nothing); kResource when the kernel does not bind
// to exactly rank.cpus, as when they are outside the process's cgroup. After an error the binding is as before. Thread
// safety: one caller at a time.
BindingResult bind_this_process(const RankPlacement& rank);

// Errors: kUnavailable where the kernel cannot say.
Binding current_binding();

// The NUMA node of the page at `address`, which must have been written to; nothing when the kernel will not say.
std::optional<int> memory_node_of(const void* address);

}  // namespace annulus
