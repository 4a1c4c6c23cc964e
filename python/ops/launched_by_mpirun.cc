// Implements launched.h over MPI: the ranks that mpirun started, or this process alone.
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <utility>

#include "comm/bootstrap/bootstrap.h"
#include "common/logging/log.h"
#include "common/version.h"
#include "python/ops/launched.h"

namespace annulus::torch_ops {
namespace {

struct World {
  explicit World(Seconds timeout) { ranks.comm->set_timeout(timeout); }
  // Objects that Python never frees, such as a graph held by an exception's traceback, may still hold the communicator.
  ~World() {
    if (getpid() != ranks.process) {  // a forked process must not free anything of MPI
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

// A process that exits with an error has not done what the other ranks expect, so it does not wait for them in
// MPI_Finalize, and the launcher ends them. A forked process does not call MPI_Finalize either: MPI belongs to its
// parent.
void at_exit(int status, void*) {
  MpiRuntime* const runtime = made->job.runtime.get();
  if (runtime == nullptr) return;
  if (getpid() != made->ranks.process || status != 0) {
    runtime->abandon();
  } else if (runtime->abandoned()) {
    log_error("comm", "rank " + std::to_string(made->job.rank) +
                          ": this process ends without MPI_Finalize, because an operation between ranks failed in it: "
                          "the launcher will report the job as failed");
  }
}

}  // namespace

const bool kHasMpi = true;

const Launched& launched(Seconds timeout) {
  static World only(timeout);  // destroyed when the process exits, which calls MPI_Finalize unless abandoned
  made = &only;
  on_exit(at_exit, nullptr);  // registered after `only` was made, so it runs before its destructor
  return only.ranks;
}

}  // namespace annulus::torch_ops
