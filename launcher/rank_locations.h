// Where the ranks of a running job are, as each rank reports it, and the network that each uses. `train` prints it at
// its start; `annulus topology` shows beforehand where ranks would go. program.cc and device.cc apply the network.
// These functions keep state of the process and belong to the thread that starts the job.
#pragma once

#include <string>
#include <vector>

#include "comm/bootstrap/bootstrap.h"
#include "comm/bootstrap/launch_info.h"
#include "launcher/launch/rank_place.h"
#include "launcher/network/network.h"

namespace annulus {

struct RankLocation {
  std::string host;
  std::string device;   // the PCI bus id of its GPU, or "cpu"
  std::string nic;      // the nearest NIC by the topology; empty if none is known
  std::string nccl;     // the network devices that NCCL reported to use; empty if it reported none
  int launch_rank = 0;  // the launcher's number of this rank, which is in the name of its log file
};

// Tells NCCL and MPI which network the job uses (network/network.h). Call it before MPI starts. The HCA of the rank
// follows from its place. If the job connects GPUs of several hosts, NCCL is made to report which devices it uses.
void set_job_network(const Network& network, const LaunchInfo& info, const RankPlace& place = rank_place());

// Call it after the ranks have chosen GPUs (`gpu`) or the CPU and before NCCL starts. If the rank's place is another
// than set_job_network knew (it may have known none), NCCL is told the HCA of the new place. MPI has already started
// and keeps its settings. Does nothing if set_job_network was not called.
void update_job_network(int local_rank, bool gpu, const RankPlace& place = rank_place());

// Lines that say what was set on this rank and who chooses the HCAs; empty if no network was named and no HCA is known.
const std::vector<std::string>& network_lines();

// Call it once a rank's device is chosen: binds the rank to its place (RankPlace::carry_out) and calls
// update_job_network.
void bind_to_device(const Job& job, bool gpu);

// Collective: the locations of all ranks, by rank. `gpu` says whether this rank computes on the GPU that it was placed
// on.
std::vector<RankLocation> gather_rank_locations(Job& job, bool gpu);

// Lines to print: which ranks form a ring (each `context` consecutive ranks are one), and for each of the first 16
// hosts the devices and NICs of its ranks in the order of the ranks.
std::vector<std::string> ring_lines(const std::vector<RankLocation>& locations, int context);

}  // namespace annulus
