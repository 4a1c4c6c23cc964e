// The communicators of the operators in a Python process: for a name, that of the PyTorch process group; for "", that
// of mpirun's ranks if it started the process, otherwise of the process alone. Used by the operators.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <string>

#include "comm/communicator.h"

namespace annulus::torch_ops {

// Exclusive use of a communicator for the duration of one operator. Operators of one group, or of mpirun's ranks, take
// turns. In a process that is alone each operator has its own communicator.
struct Turn {
  std::shared_ptr<Communicator> comm;
  std::shared_ptr<std::mutex> mutex;
  std::unique_lock<std::mutex> lock;
};

// Waits for the turn of an operator over tensors on this tensor's device. The first call finds the other ranks
// (comm/bootstrap/bootstrap.h, comm/c10d/groups.h) within a deadline, with the errors of that. Raises Error(kUsage) in
// a process forked afterwards, because the connections belong to its parent. Under mpirun, a process that exits with an
// error after this call does not wait for the other ranks, so mpirun terminates them. Thread safe.
Turn take_turn(const std::string& group, const at::Tensor& tensor);

// Returns the rank of this process in a group and the number of ranks, at any time, also in a forked process. For the
// group "" it finds the ranks as take_turn does.
struct Place {
  int64_t rank, size;
};
Place place_in(const std::string& group);

// Returns the communicator that operators over tensors on this device have used for a group, for what it knows without
// communication; null if there was none yet. For the group "" it finds the ranks as take_turn does.
std::shared_ptr<Communicator> used_communicator(const std::string& group, at::Device device);

// Sets the deadline in seconds of each later operation between ranks; the default is ANNULUS_TIMEOUT, or 300 s. Does
// not look for other ranks. Raises Error(kUsage) unless the number is from 0.1 to 31536000 (a year).
void set_timeout(double seconds);

}  // namespace annulus::torch_ops
