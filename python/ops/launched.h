// The ranks that a launcher started, for operators whose group is "". launched_by_mpirun.cc finds the ranks that mpirun
// started; launched_alone.cc, for a library without MPI, supports one process only. Used by world.cc and reports.cc.
#pragma once

#include <sys/types.h>

#include <memory>

#include "comm/communicator.h"

namespace annulus::torch_ops {

struct Launched {
  std::shared_ptr<Communicator> comm;  // has one rank if the process is alone
  pid_t process;                       // the process that found the ranks; processes that it forks cannot use them
};

extern const bool kHasMpi;

// Finds the ranks at the first call and sets the deadline of their operations; later calls return the same. If it
// raises, it may be called again.
const Launched& launched(Seconds timeout);

}  // namespace annulus::torch_ops
