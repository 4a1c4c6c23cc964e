// See launched.h: the process alone, for a library without MPI.
#include <unistd.h>

#include <string>

#include "comm/launch_info.h"
#include "comm/threads/threads.h"
#include "common/error.h"
#include "torch_ops/launched.h"

namespace annulus::torch_ops {

const bool kHasMpi = false;

const Launched& launched(Seconds) {
  const LaunchInfo info = launch_info();
  const int size = info.annulus_size > 0 ? info.annulus_size : info.launched ? info.size : 1;
  if (size != 1) {
    throw Error(ErrorKind::kUsage, "torch",
                (info.launched ? info.launcher : "ANNULUS_WORLD_SIZE") + " says that this is one of " +
                    std::to_string(size) +
                    " processes, and this library of annulus is built without MPI: pass group = the name of a process "
                    "group of torch.distributed; processes that are to compute each for itself: ANNULUS_WORLD_SIZE=1");
  }
  static const Launched alone{make_self_communicator(), getpid()};
  return alone;
}

}  // namespace annulus::torch_ops
