// Placement: which rank runs where: host, device, processors, memory, NIC, and the order of the ring. Made from
// Machines by `place`, printed by report.h, enforced by binding.h: the same plan is shown, tested and carried out.
//
// Thread safety: plain data and a function without state. Needs no hardware.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "comm/topology/cpu_set.h"
#include "comm/topology/machine.h"

namespace annulus {

enum class DeviceKind { kCpu, kCuda };
std::string_view to_string(DeviceKind kind);  // "cpu", "cuda"

struct PlacementOptions {
  DeviceKind device = DeviceKind::kCpu;
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
  int threads = 1;              // cores in `cpus`
  bool oversubscribed = false;  // shares a core with another rank
  bool is_this_system = false;  // as its Machine
};

// From one rank of the ring to the next.
struct Hop {
  int from = 0;
  int to = 0;
  bool other_host = false;
  Link link;  // between GPUs of one host; kSystem or kPackage with 0 MB/s between CPU ranks
};

struct Placement {
  std::vector<RankPlacement> ranks;  // by rank; the ranks of a host follow one another, hosts as given
  std::vector<int> ring;             // a permutation of the ranks; the last sends to the first
  std::vector<Hop> hops;             // hops[i]: ring[i] -> ring[i + 1]; empty for one rank
  bool oversubscribed = false;       // some host has fewer cores than ranks
};

// Places ranks_per_host[i] ranks (0 is allowed) on hosts[i].
// - CUDA: one GPU a rank; if a host has more GPUs than ranks, those that make the fastest ring. Local ranks follow the
//   PCI bus ids. A rank gets cores of the NUMA node of its GPU, which its ranks share as evenly as possible, in whole
//   cores; so where all GPUs hang on one socket, its cores serve them all and the other socket stays idle: a near core
//   is worth more than a second far one. Only when a node has fewer cores than ranks do the ranks too many move to the
//   nearest node with a core left: a far core of one's own is worth more than a near one shared.
// - CPU: ranks are spread over the NUMA nodes in proportion to their cores, in whole cores; with fewer ranks than nodes
//   each gets several whole nodes.
// - More ranks than cores on a host: hardware threads are divided while they last, then cores are shared; such ranks
//   are flagged oversubscribed.
// - NIC: the nearest by the PCI tree (CPU: by NUMA node), RDMA and active ones first, equal ones in turn.
// - Ring: hosts in their order. GPUs of a host so that the slowest link is as fast as possible, then the sum of all
//   links (ring_order.h); CPU ranks by package and NUMA node.
// Errors, kPlan: no host, no rank, more GPU ranks than GPUs on a host, more than 65,536 ranks.
Placement place(const std::vector<Machine>& hosts, const std::vector<int>& ranks_per_host,
                const PlacementOptions& options = {});

// Places `ranks` ranks: as evenly as possible over the hosts, with CUDA no more on a host than it has GPUs.
Placement place(const std::vector<Machine>& hosts, int ranks, const PlacementOptions& options = {});

}  // namespace annulus
