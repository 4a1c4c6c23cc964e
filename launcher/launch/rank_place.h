// The place of a rank: the processors, memory, GPU and HCA that it uses. It is computed before MPI starts from what the
// launcher says, the process is bound to it, and it is corrected later if CUDA or the choice of devices leads to
// another place. Used by program.cc, rank_locations.cc, device.cc and subcommands/train.cc. The parts for GPUs have
// never run on one.
//
// Thread safety: take and carry_out bind the process; call them from the thread that starts the job.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "comm/bootstrap/launch_info.h"
#include "launcher/topology/host_plan.h"
#include "launcher/topology/placement.h"

namespace annulus {

// How a RankPlace reads the host and binds the process. Tests replace these functions.
struct HostAccess {
  std::function<Host(bool respect_affinity)> read = this_host;
  // Binds the process to the cores of `rank` and the calling thread to its memory. A rank that cannot be bound runs
  // more slowly but correctly, so this is only a warning; for memory, the first rank of a host prints it for all.
  std::function<void(const RankPlacement& rank)> bind = bind_process;

  static void bind_process(const RankPlacement& rank);
};

class RankPlace {
 public:
  explicit RankPlace(HostAccess access = {}) : access_(std::move(access)) {}

  // Places the ranks of this host as `request` says, with the numbers of ranks from `info`, and binds this process.
  // Call it before any thread starts. Returns the number of threads that suit the place, or nothing if the process was
  // not bound: with ANNULUS_BIND=0, with a description of another machine (HWLOC_XMLFILE), or if the number of ranks on
  // this host is not known (srun). In the last two cases the ranks are not placed either.
  std::optional<int> take(const LaunchInfo& info, HostRequest request);

  // Places the ranks of this host on the GPUs that CUDA lets this process use, given by their PCI bus ids, unless
  // `take` has already placed all of them on such GPUs. Afterwards ranks() has `ranks` ranks of a job of `job_ranks`.
  // Binds nothing.
  void place_on_gpus(const std::vector<std::string>& pci_bus_ids, int ranks, int job_ranks);

  // Call it after the ranks have chosen GPUs (`gpu`) or the CPU. `local_rank` is this rank's number on its host. If
  // `take` bound this process to another place than that of this rank, it is bound again; memory that is allocated and
  // threads that run keep their memory binding. Returns the new number of threads if it was bound again.
  std::optional<int> carry_out(int local_rank, bool gpu);

  // The places by local rank; empty if they are not known.
  const std::vector<RankPlacement>& ranks() const { return ranks_; }

  // What the ranks of this host are bound to, by local rank, for one line of output: "cpus 0 / 1". Empty if this
  // process is not bound.
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

// The place of this process.
RankPlace& rank_place();

}  // namespace annulus
