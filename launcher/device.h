// Which device a rank computes on, and why: device = "auto", "cpu" or "cuda" of a configuration. For train and doctor.
#pragma once

#include <c10/core/Device.h>

#include <string>

namespace annulus {

struct DeviceChoice {
  at::Device device = at::kCPU;
  std::string reason;  // "cpu (this host has no GPU)": what the first line of a run says
};

// "auto": GPUs where this host has at least one for each of its `local_size` ranks and the build, the driver and the
// kernels suit; otherwise the CPU. "cuda": any shortfall raises Error(kUnavailable).
DeviceChoice choose_device(const std::string& wanted, int local_rank, int local_size);

// Why ranks cannot compute on GPUs here; empty when they can.
std::string cuda_shortfall(int local_size);

}  // namespace annulus
