// The ranks that a launcher gave this process, for operators that name no group: launched_by_mpirun.cc has those of
// mpirun, launched_alone.cc, for a library without MPI, knows the process alone. Used by world.cc.
#pragma once

#include <sys/types.h>

#include <memory>

#include "comm/communicator.h"

namespace annulus::torch_ops {

struct Launched {
  std::shared_ptr<Communicator> comm;  // of one rank where the process is by itself
  pid_t process;                       // that found the ranks: they are not those of a process that it forks
};

extern const bool kHasMpi;

// Finds them, once, and sets the deadline of their operations. Where it raises, it may be called again.
const Launched& launched(Seconds timeout);

}  // namespace annulus::torch_ops
