// Sets how precisely and reproducibly LibTorch's operators on a GPU compute, for the whole process. trainer.cc and
// training.cc call it with the settings of a configuration. Tests cover the settings; they have never been in
// force on a GPU.
#pragma once

namespace annulus {

struct GpuPrecision {
  bool tf32 = false;           // fp32 matrix products and convolutions use TF32, with a fraction of 10 bits
  bool deterministic = false;  // operators raise an error if they have no implementation with a fixed order of sums
};

// Call it before the first matrix product on a GPU, because cuBLAS reads its environment variable only once.
// Thread-safe if all calls have the same argument.
void set_gpu_precision(const GpuPrecision& precision);

}  // namespace annulus
