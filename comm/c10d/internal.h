// The parts of a communicator over a process group. Internal to comm/c10d; tests/comm/c10d_main.cc includes it as well.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <exception>
#include <memory>
#include <string>

#include "comm/communicator.h"

namespace c10d {
class ProcessGroup;
}

namespace annulus::c10d_internal {

// The message of an error of c10d, without the source location, advice and backtrace that it contains.
std::string in_short(const std::exception& e);

// A communicator for CPU tensors, over the group's backend for them. Collective.
std::unique_ptr<Communicator> make_host_communicator(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                                     Seconds timeout);

// A communicator for tensors on a device, over the group's backend for them. The ranks agree over `host`. Collective.
std::unique_ptr<Communicator> make_device_communicator(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                                       at::Device device, std::unique_ptr<Communicator> host);

}  // namespace annulus::c10d_internal
