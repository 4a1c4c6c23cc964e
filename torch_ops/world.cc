// See world.h.
#include "torch_ops/world.h"

#include <atomic>

#include "comm/bootstrap/bootstrap.h"
#include "comm/threads/threads.h"
#include "common/version.h"

namespace annulus::torch_ops {
namespace {

struct World {
  // What Python never frees (a graph that an exception's traceback holds, say) may hold the communicator.
  ~World() {
    comm.reset();
    if (job.runtime) job.runtime->finish();
  }

  Job job = bootstrap({.fingerprint = {{"version", std::string(kVersion)}, {"program", "torch.ops.annulus"}}});
  std::shared_ptr<Communicator> comm{std::move(job.world)};
  std::mutex mutex;
};

std::atomic<World*> made = nullptr;

World& world() {
  // Ends with the process: MPI_Finalize, unless abandon() was called.
  static World only;
  made = &only;
  return only;
}

}  // namespace

Turn take_turn() {
  World& w = world();
  if (w.comm->size() == 1) return {make_self_communicator(), {}};
  return {w.comm, std::unique_lock(w.mutex)};
}

void abandon() {
  World* const w = made;
  if (w != nullptr && w->job.runtime) w->job.runtime->abandon();
}

}  // namespace annulus::torch_ops
