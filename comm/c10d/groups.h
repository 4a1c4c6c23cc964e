// Communicators by the names under which PyTorch registers process groups (ProcessGroup.group_name): what an operator
// gets through torch.compile, as PyTorch's functional collectives do. Used by torch_ops.
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

// The group itself. Error(kUsage) where none has this name. Thread-safe.
c10::intrusive_ptr<c10d::ProcessGroup> named_group(const std::string& name);

// The communicator over the group of this name for tensors on this device. There is one for each group and device: it
// is made when first asked for, which is collective and must be over within `timeout`, and dropped at the next call
// after the group was unregistered (destroy_process_group). Thread-safe: communicators over several groups may be made
// at the same time, those over one group, for the CPU and for devices, in one order on all ranks.
//
// Error(kUsage) where no group has this name; otherwise as make_c10d_communicator.
std::shared_ptr<Communicator> c10d_communicator(const std::string& group_name, at::Device device, Seconds timeout);

}  // namespace annulus
