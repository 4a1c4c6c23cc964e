// Communicators by the names under which PyTorch registers process groups (ProcessGroup.group_name): what an operator
// gets through torch.compile, as PyTorch's functional collectives do. Used by torch_ops.
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <string>

#include "comm/communicator.h"

namespace annulus {

// The communicator over the group of this name for tensors on this device. There is one for each group and device: it
// is made when first asked for, which is collective, and dropped at the next call after the group was unregistered
// (destroy_process_group). Its deadline is `timeout` from then on. Thread-safe; while one is made, others wait, so that
// ranks must ask for new ones in the same order.
//
// Error(kUsage) where no group has this name; otherwise as make_c10d_communicator.
std::shared_ptr<Communicator> c10d_communicator(const std::string& group_name, at::Device device, Seconds timeout);

}  // namespace annulus
