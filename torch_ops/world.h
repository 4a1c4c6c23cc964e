// The ranks that operators of a Python process speak with: those of a process group of PyTorch's, by its name; without
// a name those of mpirun where the process was started under one, otherwise it alone. Used by the operators.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <string>

#include "comm/communicator.h"

namespace annulus::torch_ops {

// The right to communicate, for the duration of one operator. One operator at a time has it for the ranks of a group,
// or of mpirun; a process by itself needs no turns, its communicators are its own.
struct Turn {
  std::shared_ptr<Communicator> comm;
  std::shared_ptr<std::mutex> mutex;
  std::unique_lock<std::mutex> lock;
};

// For an operator over such tensors as this one. The first call finds the other ranks (comm/bootstrap/bootstrap.h,
// comm/c10d/groups.h), within a deadline, and raises as that does. Error(kUsage) in a process that was forked since:
// the ranks' connections are its parent's. Under mpirun, from the first call on a process that exits with an error ends
// the others: it does not wait for them, so the launcher ends them.
Turn take_turn(const std::string& group, const at::Tensor& tensor);

// Where this process is among the ranks of a group, which may be asked at any time, also in a process that was forked.
// Without a group, finds the ranks as take_turn does.
struct Place {
  int64_t rank, size;
};
Place place_in(const std::string& group);

// Deadline of each operation between ranks, from now on; before that ANNULUS_TIMEOUT, else 300 s. Finds no ranks.
// Error(kUsage) unless it is from 0.1 s to a year.
void set_timeout(double seconds);

}  // namespace annulus::torch_ops
