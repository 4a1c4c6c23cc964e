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
// What a process group does not give is made up for, or missing:
// - Nothing ends a transfer that hangs but the group's end. A missed deadline ends our waiting for it: the communicator
//   is dead then, the group is not, and what was under way is never freed.
// - Nothing moves a group's transfers along or asks how far they are: on CPUs a thread of ours waits for each message
//   under way, so that these move by themselves; progress() and waits only move collectives that were begun.
// - A group's own collectives cannot be let go of when a rank does not join, and sums of theirs have an order that they
//   do not tell. On CPUs all goes as messages, and sums are in the order of the ranks. The tags used are 2^30 and
//   above.
// - A process that dies is an error at once where the group notices (gloo: a connection is closed), at the deadline
//   otherwise.
// A communicator may not be used in a process that was forked after it was made: Error(kUsage).
//
// device: where tensors lie.
// - The CPU: the group's backend for CPU tensors must be able to send and receive (gloo).
// - A CUDA device: transfers go through the group's backend for CUDA tensors (NCCL) and agreement through its backend
//   for CPU tensors, so that it must have both: init_process_group("cpu:gloo,cuda:nccl"). Error(kUsage) where one is
//   missing. Hosts compare what they are about to transfer before the device gets it, and wait for each other to do so,
//   also in exchange() and begin_...(); deadlines are those of the hosts. What hangs on the device is ended by the
//   group's own timeout, as its backend does it (NCCL's watchdog by default ends the process). stats() does not know
//   what streams waited for. No device has run this: its tests run it over gloo, on CPU tensors.
std::shared_ptr<Communicator> make_c10d_communicator(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                                     at::Device device, Seconds timeout);

}  // namespace annulus
