// Gives the peak speed of a GPU from NVIDIA's data sheets by its name. trainer.cc and benchmarks/gpu/training.cc
// measure model FLOPs utilization (MFU) against it. Thread-safe.
#pragma once

#include <ATen/core/ScalarType.h>

#include <optional>
#include <string_view>

namespace annulus {

// Returns the FLOP/s of dense matrix products (without structured sparsity): of bf16 with fp32 sums, of fp32 in TF32,
// or of fp32 without tensor cores. Returns nothing for another dtype, or a name that is not exactly in the list: a part
// of a GPU (MIG), a variant with other clocks, a new device.
std::optional<double> peak_flops(std::string_view name, at::ScalarType dtype, bool tf32);

}  // namespace annulus
