// The ranks of a Python process: those of mpirun where it was started under one, otherwise itself alone. Used by the
// operators.
#pragma once

#include <memory>
#include <mutex>

#include "comm/communicator.h"

namespace annulus::torch_ops {

// The right to communicate, for the duration of one operator. With several ranks one operator at a time has it; a
// process by itself needs no turns, its communicators are its own.
struct Turn {
  std::shared_ptr<Communicator> comm;
  std::unique_lock<std::mutex> lock;
};

// The first call finds the other ranks (comm/bootstrap/bootstrap.h), within a deadline. Raises as bootstrap does. From
// then on a process that exits with an error ends the others: it does not wait for them, so the launcher ends them.
// Error(kUsage) in a process that was forked since: the ranks' connections are its parent's.
Turn take_turn();

// Its rank and size, which may be asked for at any time, also in a process that was forked. Finds the ranks as
// take_turn does.
const Communicator& ranks();

// Deadline of each operation between ranks, from now on; before that ANNULUS_TIMEOUT, else 300 s. Finds no ranks.
// Error(kUsage) unless it is from 0.1 s to a year.
void set_timeout(double seconds);

}  // namespace annulus::torch_ops
