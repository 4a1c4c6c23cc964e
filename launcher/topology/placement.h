// Placement: the host, device, processors, NUMA nodes and NIC of each rank. `place` computes it from Machines, report.h
// prints it, and the launcher and the ranks apply it, so the printed placement is the actual one.
//
// Rank order is ring order: devices are assigned so that ranks r and r + 1 are close. A schedule that sends to the next
// rank, and a mesh whose innermost axis has consecutive ranks (runtime/training/mesh.h), therefore follow the rings
// without further mapping.
//
// Thread safety: plain data, and functions without state. Independent of the hardware that it describes.
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
  int context = 0;  // ring size: ranks 0..context-1 are the first ring, and so on; 0: one ring
  // The number of ranks of the job, if `hosts` is only a part of it, as for a rank that places only its own host. Ranks
  // are then numbered from 0, and there are no hops. 0: the job has only the ranks placed here.
  int job_ranks = 0;
  // The maximum number of ranks per host, by host, when place() distributes ranks; 0 or empty: no limit.
  std::vector<int> slots = {};
};

struct RankPlacement {
  int rank = 0;
  int host_index = 0;  // into the hosts given to `place`
  std::string host;
  int local_rank = 0;  // among the host's ranks, in rank order
  DeviceKind device = DeviceKind::kCpu;
  int gpu = -1;                   // index into the host's Machine::gpus; -1 on a CPU
  std::string gpu_pci;            // the GPU's PCI bus id, independent of CUDA_VISIBLE_DEVICES; empty on a CPU
  int numa_node = 0;              // the (first) node of its processors, by the kernel's number
  CpuSet cpus;                    // never empty
  std::vector<int> memory_nodes;  // of its processors, by the kernel's numbers, ascending, never empty; several only
                                  // for a CPU rank
  int nic = -1;                   // index into the host's Machine::nics; -1 without any
  std::string nic_name;
  std::string hca;              // RDMA device and, if known, port: "mlx5_0:1"; otherwise empty
  int cores = 1;                // the number of cores with a hardware thread in `cpus`
  int threads = 1;              // `cores`, but at most an even share of Machine::cpu_quota, rounded
  bool oversubscribed = false;  // shares a core with another rank
  bool is_this_system = false;  // Machine::is_this_system of its host
};

// The connection from a rank to the next rank of its ring.
struct Hop {
  int from = 0;
  int to = 0;
  bool other_host = false;
  Link link;  // between GPUs of one host; kSystem or kPackage with 0 MB/s between CPU ranks
};

struct Placement {
  std::vector<RankPlacement> ranks;  // by rank; the ranks of a host are consecutive
  int context = 1;                   // ring size
  std::vector<Hop> hops;             // hops[i]: from rank i; empty if a ring has one rank, or for a part of a job
  bool oversubscribed = false;       // some host has fewer cores than ranks
};

// Places ranks_per_host[i] ranks (0 is allowed) on hosts[i].
// - CUDA: each rank gets one GPU. If a host has more GPUs than ranks, those with the fastest rings are used. The order
//   of the GPUs maximizes the slowest link of any ring, then the sum of all links, then the closeness to a NIC of the
//   ranks from which a ring continues on another host (ring_order.h). Ties go to the order nearest to that of the PCI
//   bus ids.
// - CUDA: a rank gets cores of its GPU's NUMA node; the ranks of a node share its cores as evenly as whole cores allow.
//   If all GPUs are attached to one socket, the other socket stays idle, because locality is worth more than additional
//   remote cores. If a node has fewer cores than ranks, the surplus ranks move to the nearest node with a free core,
//   because a remote exclusive core is better than a local shared one, and if no core is free, to the nearest node with
//   a free hardware thread.
// - CPU: the cores are divided evenly, in the order of the packages and their nodes, which is that of the ranks. A rank
//   may have cores of several nodes, because the slowest rank determines the time of a step. If the boundary of a node
//   is within an eighth of a rank's share (or half a core), the division is moved there.
// - If a host has more ranks than cores, hardware threads are divided; if those do not suffice, ranks share cores, in
//   proportion to the cores' hardware threads. Each rank then stays on one node. Such ranks are flagged as
//   oversubscribed.
// - NIC: active NICs are preferred, then RDMA devices, then the nearest by the PCI tree (for CPU ranks: by NUMA node).
//   Equally good NICs are used round-robin.
// - Hosts keep their order, and the ranks of a host are consecutive, so a ring enters and leaves each of its hosts
//   once. If the number of ranks of a host is not a multiple of `context`, its GPUs form a path of fast links instead
//   of rings. A host's placement thus depends only on its own ranks.
// Errors: kUnavailable for more CUDA ranks than GPUs on a host; kPlan for no host, no rank, more than 65,536 ranks, or
// a number of ranks that is not a multiple of `context`.
Placement place(const std::vector<Machine>& hosts, const std::vector<int>& ranks_per_host,
                const PlacementOptions& options = {});

// Returns the number of `ranks` on each host; room[i] is the capacity of host i. Whole rings of `context` ranks are
// distributed first, evenly over the hosts, while they fit; the remaining ranks go to as few hosts as possible. So a
// ring is split only if no host has capacity for all of it. Example: with room {8, 8, 4}, 16 ranks become
// {8, 4, 4} for rings of 4 and {8, 8, 0} for rings of 8. With context 0, ranks are distributed evenly without regard to
// rings. Raises Error(kPlan) if the total capacity is too small.
std::vector<int> deal_ranks(const std::vector<int>& room, int ranks, int context);

// Returns an order of the hosts (indices) in which fewer boundaries between hosts split rings, or the original order if
// that is as good. Hosts whose ranks make up whole rings together become adjacent: for {4, 8, 4} ranks and rings of 8
// the order is {0, 2, 1}.
std::vector<size_t> order_hosts(const std::vector<int>& ranks_per_host, int context);

// Places `ranks` ranks, numbered in the order of order_hosts, with at most `options.slots` on a host. CUDA ranks are
// distributed by deal_ranks, with at most one per GPU. CPU ranks are distributed as evenly as possible, because a host
// with more ranks would be slower. Raises as place() above does.
Placement place(const std::vector<Machine>& hosts, int ranks, const PlacementOptions& options = {});

}  // namespace annulus
