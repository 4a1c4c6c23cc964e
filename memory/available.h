// How much memory this process can still take on its host before the kernel ends a process: the free memory of the
// host, and what each control group (a container, a job of a batch system) still allows. Used by training, by the
// logits verb and by the planner, which compare it with what they need before they allocate. It works on Linux and
// reads only files of the kernel. Thread safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace annulus {

struct AvailableMemory {
  int64_t bytes = 0;
  std::string limit;  // what limits it: "the host's memory", "the limit of 16.0 GB of the control group /x"
};

// The smallest of all limits; nullopt if the kernel does not say. Memory of the kernel's cache of files counts as free.
// root: the folder of the kernel's files, for tests.
std::optional<AvailableMemory> available_memory(const std::string& root = "");

}  // namespace annulus
