// Placement: where each rank runs, that is its host, device, processors, memory and NIC. `place` makes it from
// Machines, report.h prints it, and the launcher and the ranks apply it, so the placement that is shown is the one that
// runs.
//
// The order of the ranks is the order of the rings. Devices are given to the ranks so that rank r and rank r + 1 are
// neighbours. A schedule that sends to the next rank, and a mesh whose innermost axis has neighbouring ranks
// (runtime/training/mesh.h), therefore follow the rings without knowing about them.
//
// Thread safety: plain data, and functions without state. Nothing here needs the hardware that it describes.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "launcher/topology/cpu_set.h"
#include "launcher/topology/machine.h"

namespace annulus {

enum class DeviceKind { kCpu, kCuda };
std::string_view to_string(DeviceKind kind);  // "cpu", "cuda"

struct PlacementOptions {
  DeviceKind device = DeviceKind::kCpu;
  int context = 0;  // ranks of a ring: ranks 0..context-1 are the first ring, and so on; 0: all ranks are one ring
  // The ranks of the whole job, if `hosts` is only a part of it, as for a rank that has only described its own host.
  // Ranks are then numbered from 0, and there are no hops. 0: the job consists of the ranks placed here.
  int job_ranks = 0;
  // The most ranks that each host may have, by host, when place() chooses how many each gets; 0 or empty: no limit.
  std::vector<int> slots = {};
};

struct RankPlacement {
  int rank = 0;
  int host_index = 0;  // into the hosts given to `place`
  std::string host;
  int local_rank = 0;  // among the ranks of the host, by rank
  DeviceKind device = DeviceKind::kCpu;
  int gpu = -1;                   // index into the host's Machine::gpus; -1 on a CPU
  std::string gpu_pci;            // the GPU's PCI bus id, valid whatever CUDA_VISIBLE_DEVICES says; empty on a CPU
  int numa_node = 0;              // of its processors, by the system's number; the first of several
  CpuSet cpus;                    // never empty
  std::vector<int> memory_nodes;  // of its processors, by the system's numbers, ascending, never empty; several only
                                  // for a CPU rank
  int nic = -1;                   // index into the host's Machine::nics; -1 without any
  std::string nic_name;
  std::string hca;              // the name of an RDMA device and its port, if known: "mlx5_0:1"; otherwise empty
  int cores = 1;                // of which `cpus` has a hardware thread
  int threads = 1;              // `cores`, but at most an even share of Machine::cpu_quota, rounded
  bool oversubscribed = false;  // shares a core with another rank
  bool is_this_system = false;  // Machine::is_this_system of its host
};

// The connection from one rank to the next one of its ring.
struct Hop {
  int from = 0;
  int to = 0;
  bool other_host = false;
  Link link;  // between GPUs of one host; kSystem or kPackage with 0 MB/s between CPU ranks
};

struct Placement {
  std::vector<RankPlacement> ranks;  // by rank; the ranks of a host follow one another
  int context = 1;                   // ranks of a ring
  std::vector<Hop> hops;             // hops[i]: from rank i; empty if a ring has one rank, or for a part of a job
  bool oversubscribed = false;       // some host has fewer cores than ranks
};

// Places ranks_per_host[i] ranks (0 is allowed) on hosts[i].
// - CUDA: each rank gets one GPU. If a host has more GPUs than ranks, those that make the fastest rings are used. The
//   order of the GPUs makes the slowest link of any ring as fast as possible, then the sum of all links as large as
//   possible, then puts the ranks from which a ring continues on another host as near to a NIC as possible
//   (ring_order.h). Of equal orders it is the one nearest to the order of the PCI bus ids.
// - CUDA: a rank gets cores of its GPU's NUMA node; the ranks of a node share its cores as evenly as whole cores allow.
//   If all GPUs are attached to one socket, the other socket stays idle, because one near core is worth more than an
//   additional far one. If a node has fewer cores than ranks, the surplus ranks move to the nearest node with a core
//   left, because a far core of its own is worth more to a rank than a near core that it shares; and if no core is
//   left, to the nearest node with a hardware thread left.
// - CPU: the cores are divided evenly, in the order of the packages and their nodes, which is that of the ranks. A
//   rank may have cores of several nodes, because the slowest rank decides how long a step takes. Where the border of a
//   node is within an eighth of a rank's share (or half a core), the cores are divided there.
// - If a host has more ranks than cores, its hardware threads are divided while they last; then cores are shared, each
//   by as many ranks as its threads are of all. A rank then keeps to one node. Such ranks are flagged as
//   oversubscribed.
// - NIC: active NICs are preferred, then RDMA devices, then the nearest by the PCI tree (for CPU ranks: by NUMA node).
//   Equally good NICs are used in turn.
// - Hosts keep their order, and the ranks of a host follow one another, so a ring enters and leaves each of its hosts
//   once. If the number of ranks of a host is not a multiple of `context`, its GPUs form a path of fast links instead
//   of rings. A host's placement thus depends only on its own ranks.
// Errors: kUnavailable for more CUDA ranks than GPUs on a host; kPlan for no host, no rank, more than 65,536 ranks, or
// a number of ranks that is not a multiple of `context`.
Placement place(const std::vector<Machine>& hosts, const std::vector<int>& ranks_per_host,
                const PlacementOptions& options = {});

// Returns how many of `ranks` go to each host; room[i] is the most that host i can take. Whole rings of `context` ranks
// are dealt out first, evenly over the hosts, while they fit; the remaining ranks go to as few hosts as have room for
// them. So a ring is cut only if no host has room for all of it. Example: with room {8, 8, 4}, 16 ranks become
// {8, 4, 4} for rings of 4 and {8, 8, 0} for rings of 8. With context 0, ranks are dealt out evenly without regard to
// rings. Throws Error(kPlan) if there is not room for all ranks.
std::vector<int> deal_ranks(const std::vector<int>& room, int ranks, int context);

// Returns an order of the hosts (indices) in which fewer boundaries between hosts cut rings, or their own order if that
// is as good. Hosts whose ranks make up whole rings together become neighbours: for {4, 8, 4} ranks and rings of 8 the
// order is {0, 2, 1}.
std::vector<size_t> order_hosts(const std::vector<int>& ranks_per_host, int context);

// Places `ranks` ranks, numbered in the order of order_hosts, with at most `options.slots` on a host. CUDA ranks are
// dealt out by deal_ranks, and no host gets more of them than it has GPUs. CPU ranks are dealt out as evenly as
// possible, because a host with more ranks would be slower. Throws as place() above does.
Placement place(const std::vector<Machine>& hosts, int ranks, const PlacementOptions& options = {});

}  // namespace annulus
