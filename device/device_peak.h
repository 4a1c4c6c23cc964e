// What a GPU can do at most, by its name, from NVIDIA's data sheets: model FLOPs utilization is measured against it.
// Used by trainer.cc.
#pragma once

#include <ATen/core/ScalarType.h>
#include <c10/core/Device.h>

#include <optional>
#include <string>
#include <string_view>

namespace annulus {

// FLOP/s of dense matrix products (no structured sparsity) of bf16 with fp32 sums, of fp32 in TF32, or of fp32 outside
// the tensor cores. Empty for a name that is not in the list exactly: a part of a GPU (MIG), a variant with other
// clocks, a new device.
std::optional<double> peak_flops(std::string_view name, at::ScalarType dtype, bool tf32);

// What the driver calls the device; empty for a CPU, or in a build without CUDA.
std::string gpu_name(at::Device device);

}  // namespace annulus
