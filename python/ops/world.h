// The ranks with which the operators of a Python process communicate: those of the PyTorch process group with the given
// name; for the name "" those of mpirun if it started the process, otherwise the process alone. Used by the operators.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <string>

#include "comm/communicator.h"

namespace annulus::torch_ops {

// The right to communicate for the duration of one operator. For the ranks of one group, or of mpirun, one operator at
// a time has it. A process that is alone needs no turns: each operator has a communicator of its own.
struct Turn {
  std::shared_ptr<Communicator> comm;
  std::shared_ptr<std::mutex> mutex;
  std::unique_lock<std::mutex> lock;
};

// Waits for the turn of an operator over tensors on the device of this one. The first call finds the other ranks
// (comm/bootstrap/bootstrap.h, comm/c10d/groups.h) within a deadline and raises what that raises. Raises Error(kUsage)
// in a process that was forked after that, because the connections belong to its parent. Under mpirun, once this was
// called, a process that exits with an error does not wait for the other ranks, so the launcher ends them. Thread safe.
Turn take_turn(const std::string& group, const at::Tensor& tensor);

// The rank of this process in a group and the number of ranks. May be called at any time, also in a forked process. If
// the group is "", it finds the ranks as take_turn does.
struct Place {
  int64_t rank, size;
};
Place place_in(const std::string& group);

// Sets the deadline in seconds of each later operation between ranks. Until then it is ANNULUS_TIMEOUT, or 300 s
// without that variable. Does not look for other ranks. Raises Error(kUsage) unless the number is from 0.1 to 31536000
// (a year).
void set_timeout(double seconds);

}  // namespace annulus::torch_ops
