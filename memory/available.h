// How much memory this process may still take on its host before the kernel ends something: what the host has left, and
// what each control group (a container, a job of a batch system) is still allowed. Used by training, which holds its
// memory plan against it before anything is allocated. Linux; needs nothing but the kernel's files.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace annulus {

struct AvailableMemory {
  int64_t bytes = 0;
  std::string limit;  // what bounds it: "the host's memory", "the limit of 16.0 GB of the control group /x"
};

// The least of all bounds; none where the kernel does not say. What caches of files hold counts as free. `root`: where
// the kernel's files are, for tests.
std::optional<AvailableMemory> available_memory(const std::string& root = "");

}  // namespace annulus
