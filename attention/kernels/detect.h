// Finds which attention kernels this build and machine have. Only this code looks for them. Used by choose_kernel, the
// composed kernel, `annulus doctor` and python/ops.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace annulus {

struct DetectedKernel {
  std::string name;    // "FlashAttention 3", ...
  std::string inputs;  // the dtypes and head sizes that it takes
  bool found = false;
  std::string note;  // where it comes from, or why it is missing
};

// What a GPU and the installed libraries offer.
struct GpuAbilities {
  std::string name;    // "NVIDIA H200"; empty: no GPU that this build can use
  int capability = 0;  // 90: compute capability 9.0
  int64_t cudnn = 0;   // the version of cuDNN, 91900 for 9.19.0; 0: LibTorch is built without it
  int64_t multiprocessors = 0;
  bool flash2 = false;  // whether LibTorch is built with FlashAttention
  // Why FlashAttention 3 cannot be called; empty if it can.
  std::string flash3_obstacle = "no operator flash_attn_3::fwd";
};

// All kernels that are looked for, the fastest first. The first call looks. Thread safe.
const std::vector<DetectedKernel>& detected_kernels();
// The abilities of the first GPU that this process may use. The first call looks. Thread safe.
const GpuAbilities& gpu_abilities();

}  // namespace annulus
