// See world.h.
#include "torch_ops/world.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>

#include "comm/bootstrap/bootstrap.h"
#include "comm/threads/threads.h"
#include "common/environment.h"
#include "common/error.h"
#include "common/text.h"
#include "common/version.h"

namespace annulus::torch_ops {
namespace {

constexpr double kShortest = 0.1, kLongest = 365.0 * 86400;  // seconds

struct World {
  explicit World(Seconds timeout) { comm->set_timeout(timeout); }
  // What Python never frees (a graph that an exception's traceback holds, say) may hold the communicator.
  ~World() {
    if (getpid() != pid) {  // nothing of MPI is a forked process's to free
      new std::shared_ptr(std::move(comm));
      return;
    }
    if (job.runtime) job.runtime->note_timeout(comm->timeout());
    comm.reset();
    if (job.runtime) job.runtime->finish();
  }

  Job job = bootstrap({.fingerprint = {{"version", std::string(kVersion)}, {"program", "torch.ops.annulus"}}});
  std::shared_ptr<Communicator> comm{std::move(job.world)};
  const pid_t pid = getpid();
  std::mutex mutex;
};

std::mutex guard;               // of these two
std::optional<Seconds> chosen;  // by set_timeout
World* made = nullptr;

// A process that ends with an error has not done what the other ranks expect: it does not wait for them in
// MPI_Finalize, and so the launcher ends them. Neither does a process that was forked: MPI is its parent's.
void at_exit(int status, void*) {
  MpiRuntime* const runtime = made->job.runtime.get();
  if (runtime == nullptr) return;
  if (getpid() != made->pid || status != 0) {
    runtime->abandon();
  } else if (runtime->abandoned()) {
    std::fprintf(stderr,
                 "[comm] rank %d: this process ends without MPI_Finalize, because an operation between ranks failed in "
                 "it: the launcher will report the job as failed\n",
                 made->job.rank);
  }
}

World& world() {
  const std::lock_guard lock(guard);
  // Ends with the process: MPI_Finalize, unless abandoned.
  static World only(chosen.value_or(Seconds(number_from_environment("ANNULUS_TIMEOUT", 300, kShortest, kLongest))));
  if (made == nullptr) {
    made = &only;
    on_exit(at_exit, nullptr);  // after `only` was made, so it runs before that is destroyed
  }
  return only;
}

}  // namespace

Turn take_turn() {
  World& w = world();
  if (w.comm->size() == 1) return {make_self_communicator(), {}};
  if (getpid() != w.pid) {
    throw Error(ErrorKind::kUsage, "torch",
                "this process was forked after its parent had found the other ranks, and MPI's connections stay the "
                "parent's: call attention and all_reduce in the parent alone, not in workers that load data, or start "
                "processes before the first call or with the start method \"spawn\" of multiprocessing");
  }
  return {w.comm, std::unique_lock(w.mutex)};
}

const Communicator& ranks() { return *world().comm; }

void set_timeout(double seconds) {
  if (!(seconds >= kShortest && seconds <= kLongest)) {
    throw Error(ErrorKind::kUsage, "comm",
                "a timeout is a number of seconds from " + exact(kShortest) + " to " + exact(kLongest) + ", got " +
                    exact(seconds));
  }
  const std::lock_guard lock(guard);
  chosen = Seconds(seconds);
  if (made == nullptr) return;
  const std::lock_guard turn(made->mutex);
  made->comm->set_timeout(*chosen);
}

}  // namespace annulus::torch_ops
