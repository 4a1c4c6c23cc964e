// Measures the links between the ranks of a job, one at a time. Training does so when all ranks wait for each other and
// none of them is slow (runtime/training/rank_metrics.h): a slow link shows in nobody's own time.
#pragma once

#include <vector>

#include "comm/communicator.h"

namespace annulus {

// Collective, over comm.host(). Returns, on every rank, for each rank the least seconds of a few turns in which it
// sends 256 KiB to the next rank (the last one to rank 0) and gets a short answer. Nothing else is sent meanwhile.
// Raises as exchange and all_gather do.
std::vector<double> probe_links(Communicator& comm);

}  // namespace annulus
