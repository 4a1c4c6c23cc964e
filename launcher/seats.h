// Where the ranks of a running job are, as each says itself: what `train` writes down at its start, beside what
// `topology` foretells.
#pragma once

#include <string>
#include <vector>

#include "comm/bootstrap/bootstrap.h"
#include "comm/launch_info.h"
#include "launcher/launch/rank_place.h"
#include "launcher/network/network.h"

namespace annulus {

struct Seat {
  std::string host;
  std::string device;   // the PCI bus id of its GPU, or "cpu"
  std::string nic;      // the nearest by the topology; empty where none is known
  std::string nccl;     // the network devices that NCCL took, by its own words; empty where it said nothing
  int launch_rank = 0;  // the launcher's number of this rank, which its log file bears
};

// Tells NCCL and MPI the job's network (network/network.h); before MPI starts. The rank is given its HCA by where it is
// placed. Where GPUs of several hosts are to meet, NCCL is asked which devices it takes.
void join_network(const Network& network, const LaunchInfo& info, const RankPlace& place = rank_place());

// Once the ranks have chosen GPUs (`gpu`) or the CPU, and before NCCL starts: where the rank has come to another place
// than join_network knew (it may have known none), NCCL is told the HCA of that one. MPI has started and keeps what it
// was told. Nothing where join_network was not called.
void rejoin_network(int local_rank, bool gpu, const RankPlace& place = rank_place());

// What was done on this rank, and who chooses the HCAs; empty where no network was named and no HCA is known.
const std::vector<std::string>& network_lines();

// For a rank whose devices are chosen: carries its place out and tells NCCL, as rank_place.h and above.
void settle(const Job& job, bool gpu);

// Collective: the seats of all ranks, by rank. `gpu`: this rank computes on the GPU that it was placed on.
std::vector<Seat> gather_seats(Job& job, bool gpu);

// Lines for people: which ranks are a ring, in rings of `context` ranks in their order; and host by host, of the first
// few, the devices and NICs in the same order.
std::vector<std::string> ring_lines(const std::vector<Seat>& seats, int context);

}  // namespace annulus
