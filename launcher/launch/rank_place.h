// Where a rank of a job is: found before MPI starts from what the launcher says, carried out on its processors and
// memory, and put right where CUDA or the choice of devices shows later that it is another.
//
// Thread safety: take and carry_out change what the process runs on, and belong to the thread that starts the job.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "comm/launch_info.h"
#include "launcher/launch/host_plan.h"
#include "topology/placement.h"

namespace annulus {

// What a RankPlace asks and does; tests put their own in place of the machine's.
struct HostAccess {
  std::function<Host(bool respect_affinity)> read = this_host;
  // Binds the process to the cores of `rank` and its calling thread to the memory. A rank that cannot be bound is
  // slower, not wrong: it says so, of memory the first of its host for all.
  std::function<void(const RankPlacement& rank)> bind = bind_process;

  static void bind_process(const RankPlacement& rank);
};

class RankPlace {
 public:
  explicit RankPlace(HostAccess access = {}) : access_(std::move(access)) {}

  // Places the ranks of this host as `request` asks, whose ranks and job_ranks the launcher knows (`info`), and binds
  // this process; before any thread starts. Returns how many threads suit it; nothing where it is not bound:
  // ANNULUS_BIND=0, a description of another machine (HWLOC_XMLFILE), or nobody says how many ranks share this host
  // (srun), where it is not placed either.
  std::optional<int> take(const LaunchInfo& info, HostRequest request);

  // Places the ranks of this host on GPUs that CUDA lets this process use, by their PCI bus ids, where `take` has not
  // or has placed one on another: afterwards ranks() has `ranks` ranks of a job of `job_ranks`. Binds nothing.
  void place_on_gpus(const std::vector<std::string>& pci_bus_ids, int ranks, int job_ranks);

  // The ranks have chosen GPUs (`gpu`) or the CPU, and this one is `local_rank` of its host: what `take` has bound to a
  // place that is not this rank's is bound to the one that is. Memory that exists and the memory of threads that run
  // stay where they are. Returns how many threads suit it, where that was done.
  std::optional<int> carry_out(int local_rank, bool gpu);

  // By local rank; empty while nobody knows.
  const std::vector<RankPlacement>& ranks() const { return ranks_; }

  // What this process is bound to, with the others of its host, for one line of output: "cpus 0 / 1" by local rank;
  // empty where it is not bound.
  const std::string& text() const { return text_; }

 private:
  int bind(const RankPlacement& own);

  HostAccess access_;
  HostRequest request_;
  std::optional<Host> host_;
  std::vector<RankPlacement> ranks_;
  std::optional<RankPlacement> bound_;
  std::string text_;
};

// That of this process.
RankPlace& rank_place();

}  // namespace annulus
