// Implements launched.h for a library without MPI: the process is alone.
#include <unistd.h>

#include "comm/bootstrap/launch_info.h"
#include "comm/threads/threads.h"
#include "common/error.h"
#include "common/text.h"
#include "python/ops/launched.h"

namespace annulus::torch_ops {

const bool kHasMpi = false;

const Launched& launched(Seconds) {
  const LaunchInfo info = launch_info();
  const int size = info.annulus_size > 0 ? info.annulus_size : info.launched ? info.size : 1;
  if (size != 1) {
    throw Error(ErrorKind::kUsage, "torch",
                (info.launched ? info.launcher : "ANNULUS_WORLD_SIZE") + " says that this is one of " +
                    counted(size, "process") +
                    ", but this library of annulus is built without MPI: pass the name of a process group of "
                    "torch.distributed as group, or set ANNULUS_WORLD_SIZE=1 if each process is to compute alone");
  }
  static const Launched alone{make_self_communicator(), getpid()};
  return alone;
}

}  // namespace annulus::torch_ops
