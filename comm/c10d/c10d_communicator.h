// A Communicator over the ranks of a c10d process group, in which PyTorch's training programs hold their ranks
// (torchrun, init_process_group). It does not use MPI. python/ops uses it through the name of the group (groups.h).
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

// Makes a communicator over the ranks of `group`, which it keeps alive. Collective: all ranks of a group make their
// communicators over it in the same order. in_job() returns the global ranks of the job.
//
// A process group offers less than the contract of Communicator needs. This is how the rest is provided, or what is
// missing:
// - A transfer that hangs can only be ended by ending the group. At a missed deadline the communicator stops waiting
//   and is dead; the group is not, and the buffers of transfers that were under way are never freed.
// - A group offers no way to advance its transfers or to ask for their state. On CPUs a thread waits for each message
//   that is under way, so messages advance by themselves; progress() and waits only advance begun collectives.
// - The collectives of a group cannot be abandoned when a rank does not join, and the order of their sums is not
//   specified. On CPUs all data therefore travel as messages, and sums are made in the order of the ranks. The messages
//   use tags of 2^30 and above.
// - If a process dies, an error is raised at once if the group notices (with gloo, a connection is closed), and
//   otherwise at the deadline.
// Using a communicator in a process that was forked after it was made raises Error(kUsage).
//
// device: where the tensors are.
// - The CPU: the group's backend for CPU tensors must support send and receive (gloo does).
// - A CUDA device: transfers use the group's backend for CUDA tensors (NCCL), and agreement its backend for CPU
//   tensors. The group must have both: init_process_group("cpu:gloo,cuda:nccl"). If one is missing, Error(kUsage) is
//   raised. The hosts compare the transfers before the device gets them, and wait for each other to do so, in
//   exchange() and begin_...() as well; the deadlines apply to the hosts. If a transfer hangs on the device, the
//   group's own timeout ends it in the way of its backend (by default NCCL's watchdog ends the process). stats() does
//   not include the time that streams waited. No GPU has run this: its tests run it over gloo, on CPU tensors.
//
// timeout: the deadline of making the communicator; on the CPU also that of its operations, until set_timeout() is
// called.
std::shared_ptr<Communicator> make_c10d_communicator(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                                     at::Device device, Seconds timeout);

}  // namespace annulus
