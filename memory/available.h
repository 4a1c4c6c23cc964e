// Finds how much memory this process can still allocate before the kernel's OOM killer acts: the minimum of the host's
// free memory and what remains of each cgroup's limit. Training, the logits subcommand and the memory planner compare
// it with their demand before they allocate. Linux only; reads files of the kernel. Thread safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace annulus {

struct AvailableMemory {
  int64_t bytes = 0;
  std::string limit;  // the binding limit: "the host's memory", "the limit of 16.0 GB of the control group /x"
};

// Returns the smallest of all limits; nullopt if the kernel reports none. The page cache counts as free. root: a prefix
// of the kernel's paths, for tests.
std::optional<AvailableMemory> available_memory(const std::string& root = "");

}  // namespace annulus
