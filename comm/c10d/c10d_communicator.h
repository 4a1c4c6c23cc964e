// A Communicator over the ranks of a c10d process group, the form in which PyTorch's trainers hold their ranks
// (torchrun, init_process_group). Needs no MPI. torch_ops uses it, by the name of the group (groups.h).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>

#include "comm/communicator.h"

namespace c10d {
class ProcessGroup;
}

namespace annulus {

// Over the ranks of `group`, which it keeps. Collective: the ranks of a group make their communicators over it in the
// same order. in_job() gives the ranks of the job.
//
// device: where tensors lie.
// - The CPU: the group's backend for CPU tensors must be able to send and receive (gloo).
// - A CUDA device: transfers go through the group's backend for CUDA tensors (NCCL) and agreement through its backend
//   for CPU tensors, so that it must have both: init_process_group("cpu:gloo,cuda:nccl"). Error(kUsage) where one is
//   missing.
std::shared_ptr<Communicator> make_c10d_communicator(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                                     at::Device device, Seconds timeout);

}  // namespace annulus
