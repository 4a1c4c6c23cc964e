// Placement: which rank runs where: host, device, processors, memory and NIC. Made from Machines by `place`, printed by
// report.h, carried out by the launcher: the same placement is shown, tested and run.
//
// The order of the ranks is the order of the rings. Devices are given to the ranks so that rank r and rank r + 1 are
// neighbours: a schedule that sends to the next rank, and a mesh whose innermost axis has neighbouring ranks
// (training/mesh.h), follow the rings without a word about them.
//
// Thread safety: plain data and a function without state. Needs no hardware.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "topology/cpu_set.h"
#include "topology/machine.h"

namespace annulus {

enum class DeviceKind { kCpu, kCuda };
std::string_view to_string(DeviceKind kind);  // "cpu", "cuda"

struct PlacementOptions {
  DeviceKind device = DeviceKind::kCpu;
  int context = 0;  // ranks of a ring: 0..context-1 are the first, the next as many the second; 0: all are one
  // Where these hosts are a part of a job, as a rank sees it that knows its own host alone: the ranks of the job. Ranks
  // are then numbered from 0, and there are no hops. 0: those placed are all.
  int job_ranks = 0;
  // Where ranks are dealt out: the most that each host may have, by host; 0 or empty: not said.
  std::vector<int> slots = {};
};

struct RankPlacement {
  int rank = 0;
  int host_index = 0;  // into the hosts given to `place`
  std::string host;
  int local_rank = 0;  // among the ranks of the host, by rank
  DeviceKind device = DeviceKind::kCpu;
  int gpu = -1;                   // index into the host's Machine::gpus; -1 on a CPU
  std::string gpu_pci;            // by which the CUDA side finds it, whatever CUDA_VISIBLE_DEVICES says; empty on a CPU
  int numa_node = 0;              // of its processors, as the system numbers it; the first of several
  CpuSet cpus;                    // never empty
  std::vector<int> memory_nodes;  // as the system numbers them, ascending, never empty: one, but for a CPU rank that
                                  // has several nodes to itself
  int nic = -1;                   // index into the host's Machine::nics; -1 without any
  std::string nic_name;
  std::string hca;              // of an RDMA device: its name and, where it is known, the port: "mlx5_0:1"
  int threads = 1;              // cores in `cpus`
  bool oversubscribed = false;  // shares a core with another rank
  bool is_this_system = false;  // as its Machine
};

// From one rank to the next of its ring.
struct Hop {
  int from = 0;
  int to = 0;
  bool other_host = false;
  Link link;  // between GPUs of one host; kSystem or kPackage with 0 MB/s between CPU ranks
};

struct Placement {
  std::vector<RankPlacement> ranks;  // by rank; the ranks of a host follow one another, hosts as given
  int context = 1;                   // ranks of a ring
  std::vector<Hop> hops;             // hops[i]: from rank i; empty where a ring has one rank, and of a part of a job
  bool oversubscribed = false;       // some host has fewer cores than ranks
};

// Places ranks_per_host[i] ranks (0 is allowed) on hosts[i].
// - CUDA: one GPU a rank; if a host has more GPUs than ranks, those that make the fastest rings. GPUs of a host are
//   given out so that the slowest link of any ring is as fast as possible, then the sum of all links, then the ranks
//   from which a ring goes on to another host as near to a NIC (ring_order.h); of equal orders that nearest to the PCI
//   bus ids'. A rank gets cores of the NUMA node of its GPU, which its ranks share
//   as evenly as possible, in whole cores; so where all GPUs hang on one socket, its cores serve them all and the other
//   socket stays idle: a near core is worth more than a second far one. Only when a node has fewer cores than ranks do
//   the ranks too many move to the nearest node with a core left: a far core of one's own is worth more than a near one
//   shared.
// - CPU: ranks are spread over the NUMA nodes in proportion to their cores, in whole cores; with fewer ranks than nodes
//   each gets several whole nodes. Ranks follow the packages and their nodes.
// - More ranks than cores on a host: hardware threads are divided while they last, then cores are shared; such ranks
//   are flagged oversubscribed.
// - NIC: the nearest by the PCI tree (CPU: by NUMA node), RDMA and active ones first, equal ones in turn.
// - Hosts are in their order, and the ranks of a host follow one another: a ring goes once into each host that it has
//   ranks on and once out of it. Where a host's ranks are no
//   multiple of a ring's, its GPUs are a path of fast links instead of rings. So a host's part depends on its own ranks
//   alone.
// Errors, kPlan: no host, no rank, more GPU ranks than GPUs on a host, more than 65,536 ranks, ranks that are no
// multiple of a ring's.
Placement place(const std::vector<Machine>& hosts, const std::vector<int>& ranks_per_host,
                const PlacementOptions& options = {});

// How many of `ranks` go to each host, which has `room` for so many: first whole rings of `context` while they fit,
// evenly over the hosts, then the ranks of the others, over as few hosts as have room for them. So a ring is cut only
// where no host has room for all of it. Context 0, nothing said of rings: evenly. Error(kPlan) where there is not room
// for all.
std::vector<int> deal_ranks(const std::vector<int>& room, int ranks, int context);

// An order of the hosts in which rings are cut by fewer of their boundaries, where their own order is not as good:
// hosts whose ranks make up whole rings together stand side by side. Indices.
std::vector<size_t> order_hosts(const std::vector<int>& ranks_per_host, int context);

// Places `ranks` ranks, numbered in the order of order_hosts: with CUDA as deal_ranks says, and no more on a host than
// it has GPUs; on CPUs as evenly as possible, since a host with more ranks would be slower. On no host more than its
// slots.
Placement place(const std::vector<Machine>& hosts, int ranks, const PlacementOptions& options = {});

}  // namespace annulus
