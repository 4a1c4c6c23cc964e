// Which attention kernels this build and machine have: the one place that looks. Used by choose_kernel and `annulus
// doctor`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace annulus {

struct DetectedKernel {
  std::string name;    // "FlashAttention 3", ...
  std::string inputs;  // dtypes and head sizes it takes
  bool found = false;
  std::string note;  // where it is from, or why it is missing
};

// What a GPU and the libraries beside it offer.
struct GpuAbilities {
  std::string name;    // "NVIDIA H200"; empty: no GPU that this build can use
  int capability = 0;  // 90: compute capability 9.0
  int64_t cudnn = 0;   // its version, 91900 for 9.19.0; 0: LibTorch is built without it
  int64_t multiprocessors = 0;
  bool flash2 = false;  // LibTorch is built with FlashAttention
  // Why FlashAttention 3 cannot be called; empty where it can.
  std::string flash3_obstacle = "no operator flash_attn_3::fwd";
};

// The fastest first. Looks once; thread-safe.
const std::vector<DetectedKernel>& detected_kernels();
// Of the first GPU that this process may use. Looks once; thread-safe.
const GpuAbilities& gpu_abilities();

}  // namespace annulus
