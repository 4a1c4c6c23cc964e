// Detects the attention kernels of this build and machine. Used by choose_kernel, the composed kernel, `annulus doctor`
// and python/ops.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace annulus {

struct DetectedKernel {
  std::string name;    // "FlashAttention 3", ...
  std::string inputs;  // supported dtypes and head sizes
  bool found = false;
  std::string note;  // its origin, or why it is missing
};

// The abilities of a GPU with the installed libraries.
struct GpuAbilities {
  std::string name;    // "NVIDIA H200"; empty: no usable GPU
  int capability = 0;  // 90: compute capability 9.0
  int64_t cudnn = 0;   // its version, 91900 for 9.19.0; 0: LibTorch is built without cuDNN
  int64_t multiprocessors = 0;
  bool flash2 = false;  // whether LibTorch is built with FlashAttention
  // Why FlashAttention 3 cannot be called; empty if it can.
  std::string flash3_obstacle = "no operator flash_attn_3::fwd";
};

// Whether this build has the code for GPUs. Thread safe.
bool built_for_cuda();
// Returns all kernels, found or not, fastest first. The first call detects them. Thread safe.
const std::vector<DetectedKernel>& detected_kernels();
// Returns the abilities of the first GPU visible to this process. The first call detects them. Thread safe.
const GpuAbilities& gpu_abilities();

}  // namespace annulus
