// See launched.h: the ranks of mpirun.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

#include "comm/bootstrap/bootstrap.h"
#include "common/version.h"
#include "torch_ops/launched.h"

namespace annulus::torch_ops {
namespace {

struct World {
  explicit World(Seconds timeout) { ranks.comm->set_timeout(timeout); }
  // What Python never frees (a graph that an exception's traceback holds, say) may hold the communicator.
  ~World() {
    if (getpid() != ranks.process) {  // nothing of MPI is a forked process's to free
      new std::shared_ptr(std::move(ranks.comm));
      return;
    }
    if (job.runtime) job.runtime->note_timeout(ranks.comm->timeout());
    ranks.comm.reset();
    if (job.runtime) job.runtime->finish();
  }

  Job job = bootstrap({.fingerprint = {{"version", std::string(kVersion)}, {"program", "torch.ops.annulus"}}});
  Launched ranks{std::move(job.world), getpid()};
};

World* made = nullptr;

// A process that ends with an error has not done what the other ranks expect: it does not wait for them in
// MPI_Finalize, and so the launcher ends them. Neither does a process that was forked: MPI is its parent's.
void at_exit(int status, void*) {
  MpiRuntime* const runtime = made->job.runtime.get();
  if (runtime == nullptr) return;
  if (getpid() != made->ranks.process || status != 0) {
    runtime->abandon();
  } else if (runtime->abandoned()) {
    std::fprintf(stderr,
                 "[comm] rank %d: this process ends without MPI_Finalize, because an operation between ranks failed in "
                 "it: the launcher will report the job as failed\n",
                 made->job.rank);
  }
}

}  // namespace

const bool kHasMpi = true;

const Launched& launched(Seconds timeout) {
  static World only(timeout);  // ends with the process: MPI_Finalize, unless abandoned
  made = &only;
  on_exit(at_exit, nullptr);  // after `only` was made, so it runs before that is destroyed
  return only.ranks;
}

}  // namespace annulus::torch_ops
