// Which device a rank computes on, and why: device = "auto", "cpu" or "cuda" of a configuration or an option; and how
// the ranks communicate then. For train, attend and doctor.
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <string>

#include "comm/bootstrap/bootstrap.h"

namespace annulus {

struct DeviceChoice {
  at::Device device = at::kCPU;
  std::string reason;  // "cpu (this host has no GPU)": what the first line of a run says
};

// "auto": GPUs where this host has at least one for each of its `local_size` ranks and the build, the driver and the
// kernels suit; otherwise the CPU. "cuda": any shortfall raises Error(kUnavailable). A rank gets the GPU that it is
// placed on (launch/rank_place.h), or that of its local rank's number where CUDA names no PCI bus ids; it becomes the
// thread's current device, so that nothing of this process lands on another.
DeviceChoice choose_device(const std::string& wanted, int local_rank, int local_size, int job_size);

// Why ranks cannot compute on GPUs here; empty when they can.
std::string cuda_shortfall(int local_size);

// The GPUs that CUDA lets this process use, which may be fewer than the machine has; 0 in a build without CUDA.
int cuda_devices();

// Collective: chooses as above for every rank of the job. All ranks must come to the same kind of device; what fails on
// one ends all, with one message. A rank whose place is another by it is bound to that one, and NCCL told its HCA.
DeviceChoice choose_devices(Job& job, const std::string& wanted);

// Collective: the communicator for tensors on the chosen device, over NCCL for several ranks on GPUs. Null where
// job.world serves: on CPUs, and for one rank, which sends nothing.
std::shared_ptr<Communicator> connect_devices(Job& job, const DeviceChoice& choice);

}  // namespace annulus
