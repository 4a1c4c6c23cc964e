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

// The first call finds the other ranks (comm/bootstrap/bootstrap.h), within a deadline. Raises as bootstrap does.
Turn take_turn();

// The process is about to end without having done what the other ranks expect: it will not wait for them. Makes the
// launcher end them. Does nothing before the first turn.
void abandon();

}  // namespace annulus::torch_ops
