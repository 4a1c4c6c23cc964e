// Which attention kernels this build and machine have: the one place that looks. Used by choose_kernel and `annulus
// doctor`.
#pragma once

#include <string>
#include <vector>

namespace annulus {

struct DetectedKernel {
  std::string name;    // "FlashAttention 3", ...
  std::string inputs;  // dtypes and head sizes it takes
  bool found = false;
  std::string note;   // where it is from, or why it is missing
  bool used = false;  // there is a Kernel that calls it
};

// The fastest first. Looks once; thread-safe.
const std::vector<DetectedKernel>& detected_kernels();

}  // namespace annulus
