// Chooses the device that a rank computes on from device = "auto", "cpu" or "cuda" (a configuration's key or an
// option), and connects the ranks' devices. Used by train, attend, logits, doctor and bench. The parts for GPUs
// have never run on one.
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <string>

#include "comm/bootstrap/bootstrap.h"

namespace annulus {

struct DeviceChoice {
  at::Device device = at::kCPU;
  std::string reason;  // for the first line of a run: "cpu (this host has no GPU)"
};

// "auto" chooses a GPU if this host has at least one for each of its `local_size` ranks and the build, the driver and
// the kernels support them; otherwise it chooses the CPU. "cuda" throws Error(kUnavailable) in the latter case. A rank
// gets the GPU that it is placed on (launcher/launch/rank_place.h), or the GPU with the number of its local rank if
// CUDA reports no PCI bus ids. That GPU becomes the current device of the calling thread.
DeviceChoice choose_device(const std::string& wanted, int local_rank, int local_size, int job_size);

// The reason why `local_size` ranks cannot compute on GPUs here, or "" if they can. May change the current device.
std::string cuda_shortfall(int local_size);

// The number of GPUs that CUDA lets this process use, which may be fewer than the machine has. 0 in a build without
// CUDA.
int cuda_devices();

// Collective: choose_device on every rank of the job. All ranks must arrive at the same kind of device; a failure on
// one rank ends all of them with one message. If the choice gives a rank another place than it had, the rank is bound
// to the new place and NCCL is told the HCA of that place.
DeviceChoice choose_devices(Job& job, const std::string& wanted);

// Collective: the communicator for tensors on the chosen device, which uses NCCL for several ranks on GPUs. Null if
// job.world is enough: on CPUs, and for a single rank.
std::shared_ptr<Communicator> connect_devices(Job& job, const DeviceChoice& choice);

}  // namespace annulus
