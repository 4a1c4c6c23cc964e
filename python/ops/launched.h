// The ranks started by mpirun, for operators whose group is "". launched_by_mpirun.cc finds them; launched_alone.cc,
// for a library without MPI, supports one process only. Used by world.cc and reports.cc.
#pragma once

#include <sys/types.h>

#include <memory>

#include "comm/communicator.h"

namespace annulus::torch_ops {

struct Launched {
  std::shared_ptr<Communicator> comm;  // of one rank if the process is alone
  pid_t process;                       // the process that found them; its forked children cannot use them
};

extern const bool kHasMpi;

// Finds the ranks at the first call and sets the deadline of their operations; later calls return the same object. May
// be called again after an error.
const Launched& launched(Seconds timeout);

}  // namespace annulus::torch_ops
