// Finds process groups and their communicators by the names under which PyTorch registers groups
// (ProcessGroup.group_name). An operator takes such a name, as PyTorch's functional collectives do, so that it works
// with torch.compile. Used by python/ops.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <string>

#include "comm/communicator.h"

namespace c10d {
class ProcessGroup;
}

namespace annulus {

// The group of this name. Raises Error(kUsage) if no group has it. Thread safe.
c10::intrusive_ptr<c10d::ProcessGroup> named_group(const std::string& name);

// The communicator over the group of this name for tensors on this device. There is one for each group and device. The
// first call makes it, which is collective and must finish within `timeout`; the first call after the group was
// unregistered (destroy_process_group) drops it. Thread safe: communicators over several groups may be made at the same
// time. Those over one group, for the CPU and for devices, must be made in the same order on all ranks.
//
// Raises Error(kUsage) if no group has this name, and otherwise what make_c10d_communicator raises.
std::shared_ptr<Communicator> c10d_communicator(const std::string& group_name, at::Device device, Seconds timeout);

// The communicator that c10d_communicator() has made for a device; null if it has not, or is making it. Thread safe.
std::shared_ptr<Communicator> made_communicator(const std::string& group_name, at::Device device);

// Drops the communicators of all groups that are no longer registered, and so the last references to these groups. It
// waits for the threads of their backends. A program calls it before the interpreter is finalized: gloo's threads may
// hold tensors of Python for a while after their work is done, and abort the process if they release them later
// (https://github.com/pytorch/pytorch/issues/190489). Thread safe.
void release_ended_groups();

}  // namespace annulus
