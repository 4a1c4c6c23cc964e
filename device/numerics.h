// What LibTorch's operators on a GPU may do to numbers: settings of the whole process, from a configuration. Called by
// training.cc.
#pragma once

namespace annulus {

struct GpuNumerics {
  bool tf32 = false;           // fp32 matrix products and convolutions with 10 bits of fraction
  bool deterministic = false;  // operators that have only an implementation without a fixed order raise an error
};

// Before the first matrix product on a GPU: cuBLAS reads its part of the environment once. Thread-safe among equal
// calls.
void set_gpu_numerics(const GpuNumerics& numerics);

}  // namespace annulus
