// The parts of a communicator over a process group. Internal to comm/c10d, and for its tests.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/intrusive_ptr.h>

#include <exception>
#include <memory>
#include <string>

#include "comm/communicator.h"

namespace c10d {
class ProcessGroup;
}

namespace annulus::c10d_internal {

// What an error of c10d's says, without where in a source it was raised, advice and a backtrace.
std::string in_short(const std::exception& e);

// "200 bytes (message 3 between these ranks, fp32)"; `shape` goes behind the dtype.
std::string describe_message(int64_t bytes, int64_t number, at::ScalarType dtype, const std::string& shape = "");

// For CPU tensors, over the group's backend for these.
std::unique_ptr<Communicator> make_host_communicator(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                                     Seconds timeout);

// For tensors on a device, over the group's backend for these; host carries what ranks agree on.
std::unique_ptr<Communicator> make_device_communicator(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                                       at::Device device, std::unique_ptr<Communicator> host);

}  // namespace annulus::c10d_internal
