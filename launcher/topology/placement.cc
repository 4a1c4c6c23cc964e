// See placement.h.
#include "launcher/topology/placement.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

#include "common/control_groups/control_groups.h"
#include "common/error.h"
#include "common/text.h"
#include "launcher/topology/ring_order.h"

namespace annulus {
namespace {

constexpr int64_t kMaxRanks = 65536;

[[noreturn]] void fail(const std::string& message) { throw Error(ErrorKind::kPlan, "topology", message); }
[[noreturn]] void lack(const std::string& message) { throw Error(ErrorKind::kUnavailable, "topology", message); }

// The nearness of a GPU is that of its nearest NIC among those that ranks are given: RDMA devices with a port that is
// up if there are any, otherwise other active NICs.
GpuGraph graph_of(const Machine& machine) {
  GpuGraph graph;
  for (const auto& row : machine.links) {
    auto& values = graph.bandwidth.emplace_back();
    for (const Link& link : row) values.push_back(link.megabytes_per_s);
  }
  const auto worth = [](const Nic& nic) { return nic.active ? nic.rdma ? 2 : 1 : 0; };
  int best = 0;
  for (const Nic& nic : machine.nics) best = std::max(best, worth(nic));
  for (const Gpu& gpu : machine.gpus) {
    int nearest = 0;
    for (const Nic& nic : machine.nics) {
      if (worth(nic) < best) continue;
      const LinkKind kind = pci_distance(machine, gpu.path, gpu.numa, nic.path, nic.numa);
      nearest = std::max(nearest, static_cast<int>(LinkKind::kSystem) - static_cast<int>(kind));
    }
    graph.nearness.push_back(nearest);
  }
  return graph;
}

// Returns floor(i * total / parts), where part i begins.
int share(int i, int total, int parts) { return static_cast<int>(static_cast<int64_t>(i) * total / parts); }

// Places the ranks of one host.
class HostPlacer {
 public:
  HostPlacer(const Machine& machine, RingPieces pieces, int count)
      : machine_(machine), ranks_(count), pieces_(std::move(pieces)) {
    cores_of_.resize(machine.numa_nodes.size());
    for (size_t i = 0; i < machine.cores.size(); ++i) {
      cores_of_[machine.cores[i].numa].push_back(static_cast<int>(i));
    }
    for (size_t i = 0; i < cores_of_.size(); ++i) {
      if (!cores_of_[i].empty()) nodes_.push_back(static_cast<int>(i));
    }
  }

  std::vector<RankPlacement> place(DeviceKind device) {
    for (size_t i = 0; i < ranks_.size(); ++i) {
      ranks_[i].host = machine_.host;
      ranks_[i].local_rank = static_cast<int>(i);
      ranks_[i].device = device;
      ranks_[i].is_this_system = machine_.is_this_system;
    }
    if (device == DeviceKind::kCuda) {
      place_gpus();
    } else {
      place_cpus();
    }
    choose_threads();
    choose_nics();
    return std::move(ranks_);
  }

 private:
  int cores(int node) const { return static_cast<int>(cores_of_[node].size()); }

  int threads(int node) const {
    int count = 0;
    for (int core : cores_of_[node]) {
      count += static_cast<int>(machine_.cores[core].pus.size());
    }
    return count;
  }

  void place_gpus() {
    const GpuGraph graph = graph_of(machine_);
    const std::vector<int> gpus = best_ring_order(graph, best_members(graph, pieces_), pieces_);
    for (size_t i = 0; i < ranks_.size(); ++i) {
      ranks_[i].gpu = gpus[i];
      ranks_[i].gpu_pci = machine_.gpus[gpus[i]].pci;
    }

    // Ranks whose GPU is near only one node choose first; those with a choice come later and even the nodes out.
    std::vector<std::vector<int>> members(machine_.numa_nodes.size());
    std::vector<size_t> by_choice(ranks_.size());
    std::iota(by_choice.begin(), by_choice.end(), size_t{0});
    std::stable_sort(by_choice.begin(), by_choice.end(),
                     [&](size_t a, size_t b) { return near_nodes(ranks_[a]).size() < near_nodes(ranks_[b]).size(); });
    for (size_t r : by_choice) {
      const std::vector<int> near = near_nodes(ranks_[r]);
      members[choose_node(near, members)].push_back(static_cast<int>(r));
    }
    for (int node : nodes_) {
      auto& list = members[node];
      std::sort(list.begin(), list.end());
      divide(node, list);
    }
  }

  // Returns the nodes with cores near the rank's GPU, or all nodes with cores if there are none.
  std::vector<int> near_nodes(const RankPlacement& rank) const {
    std::vector<int> near;
    for (int node : machine_.gpus[rank.gpu].numa) {
      if (cores(node) > 0) near.push_back(node);
    }
    return near.empty() ? nodes_ : near;
  }

  // Chooses the node for one more rank: the nearest with a core left, else the nearest with a hardware thread left,
  // else a near one.
  int choose_node(const std::vector<int>& near, const std::vector<std::vector<int>>& members) const {
    std::set<int> packages;
    for (int node : near) packages.insert(machine_.numa_nodes[node].package);
    int best = nodes_.front();
    std::tuple<int, double, int> best_cost{9, 0, 0};
    for (int node : nodes_) {
      const int taken = static_cast<int>(members[node].size());
      const bool is_near = std::find(near.begin(), near.end(), node) != near.end();
      const bool same_package = packages.contains(machine_.numa_nodes[node].package);
      const int full = taken < cores(node) ? 0 : taken < threads(node) ? 1 : 2;
      const int room = full == 0 ? cores(node) : threads(node);
      const int distance = is_near ? 0 : same_package ? 1 : 2;
      const std::tuple<int, double, int> cost{3 * full + distance, (taken + 1.0) / static_cast<double>(room), node};
      if (cost < best_cost) {
        best_cost = cost;
        best = node;
      }
    }
    return best;
  }

  void place_cpus() {
    const int n = static_cast<int>(ranks_.size());
    if (n <= static_cast<int>(machine_.cores.size())) {
      cut_cores(n);
    } else {
      share_threads(n);
    }
  }

  // Cuts the cores, in the order of their nodes, into a part for each rank.
  void cut_cores(int n) {
    std::vector<int> all;
    std::vector<int> borders;  // of the nodes: the numbers of cores before them
    for (int node : nodes_) {
      const std::vector<int>& own = cores_of_[node];
      borders.push_back(static_cast<int>(all.size()));
      all.insert(all.end(), own.begin(), own.end());
    }
    const auto total = static_cast<int64_t>(all.size());
    // The i-th cut is at i / n of the cores, rounded, or at the border of a node that is nearly there: memory of
    // another node is slower to reach, which outweighs an eighth of a rank's cores, but not much more.
    const auto cut = [&](int64_t i) {
      if (i == n) return total;
      int64_t best = (2 * i * total + n) / (2 * n);
      int64_t most =
          std::max<int64_t>(total, 4 * n);  // 8 n times the distance that is allowed, an eighth or half a core
      for (const int border : borders) {
        const int64_t distance = 8 * std::abs(border * n - i * total);
        if (distance > most) continue;
        most = distance;
        best = border;
      }
      return best;
    };
    for (int r = 0; r < n; ++r) give_cores(ranks_[r], {all.begin() + cut(r), all.begin() + cut(r + 1)});
  }

  // Divides hardware threads, or cores if there are fewer threads than ranks, among more ranks than there are cores.
  void share_threads(int n) {
    // Each node gets one rank; the others go one by one to the node with the most hardware threads per rank.
    std::vector<int> count(nodes_.size(), 1);
    for (int left = n - static_cast<int>(nodes_.size()); left > 0; --left) {
      size_t best = 0;
      for (size_t i = 1; i < nodes_.size(); ++i) {
        if (int64_t{threads(nodes_[i])} * (count[best] + 1) > int64_t{threads(nodes_[best])} * (count[i] + 1)) best = i;
      }
      ++count[best];
    }
    int r = 0;
    for (size_t i = 0; i < nodes_.size(); ++i) {
      std::vector<int> list(count[i]);
      std::iota(list.begin(), list.end(), r);
      r += count[i];
      divide(nodes_[i], list);
    }
  }

  // Gives whole cores to a rank, and the memory of their nodes.
  void give_cores(RankPlacement& rank, const std::vector<int>& own) const {
    std::vector<int> pus;
    std::set<int> memory;
    for (int core : own) {
      add_pus(pus, core);
      memory.insert(machine_.numa_nodes[machine_.cores[core].numa].id);
    }
    const Core& first = machine_.cores[own.front()];
    rank.numa_node = machine_.numa_nodes[first.numa].id;
    rank.memory_nodes.assign(memory.begin(), memory.end());
    rank.cpus = CpuSet(std::move(pus));
    rank.cores = static_cast<int>(own.size());
  }

  void add_pus(std::vector<int>& out, int core) const {
    const auto& pus = machine_.cores[core].pus;
    out.insert(out.end(), pus.begin(), pus.end());
  }

  // Divides the cores of a node among the local ranks in `list`, or if there are too few, its hardware threads.
  void divide(int node, const std::vector<int>& list) {
    const std::vector<int>& own = cores_of_[node];
    const int c = static_cast<int>(own.size());
    const int k = static_cast<int>(list.size());
    std::vector<int> pus;
    std::vector<int> core_of_pu;
    for (int core : own) {
      add_pus(pus, core);
      core_of_pu.resize(pus.size(), core);
    }
    const int p = static_cast<int>(pus.size());
    for (int i = 0; i < k; ++i) {
      RankPlacement& rank = ranks_[list[i]];
      if (k <= c) {
        give_cores(rank, {own.begin() + share(i, c, k), own.begin() + share(i + 1, c, k)});
        continue;
      }
      // Of more ranks than threads, each gets the core of its share of the threads, on which it shares all threads.
      give_cores(rank, {core_of_pu[share(i, p, k)]});
      rank.oversubscribed = true;
      if (k > p) continue;
      const auto at = [&](int j) { return pus.begin() + share(j, p, k); };
      rank.cpus = CpuSet(std::vector<int>(at(i), at(i + 1)));
      rank.cores = static_cast<int>(
          std::set<int>(core_of_pu.begin() + share(i, p, k), core_of_pu.begin() + share(i + 1, p, k)).size());
    }
  }

  // A rank has a thread for each of its cores, but all ranks together only as many as the processors' time allows.
  void choose_threads() {
    const double even = machine_.cpu_quota / static_cast<double>(ranks_.size());
    for (RankPlacement& rank : ranks_) {
      rank.threads = machine_.cpu_quota > 0 ? std::min(rank.cores, whole_processors(even)) : rank.cores;
    }
  }

  void choose_nics() {
    if (machine_.nics.empty()) return;
    std::vector<int> used(machine_.nics.size(), 0);
    for (RankPlacement& rank : ranks_) {
      std::vector<int> numa;
      PciPath path;
      if (rank.gpu >= 0) {
        numa = machine_.gpus[rank.gpu].numa;
        path = machine_.gpus[rank.gpu].path;
      } else {
        for (size_t i = 0; i < machine_.numa_nodes.size(); ++i) {
          if (machine_.numa_nodes[i].id == rank.numa_node) numa.push_back(static_cast<int>(i));
        }
      }
      int best = 0;
      std::tuple<bool, bool, int, bool, int> best_cost;
      for (size_t i = 0; i < machine_.nics.size(); ++i) {
        const Nic& nic = machine_.nics[i];
        const LinkKind distance = pci_distance(machine_, path, numa, nic.path, nic.numa);
        const bool other_node = numa != nic.numa;  // within a package of several nodes
        const std::tuple<bool, bool, int, bool, int> cost{!nic.active, !nic.rdma, static_cast<int>(distance),
                                                          other_node, used[i]};
        if (i == 0 || cost < best_cost) {
          best_cost = cost;
          best = static_cast<int>(i);
        }
      }
      ++used[best];
      rank.nic = best;
      const Nic& nic = machine_.nics[best];
      rank.nic_name = nic.name;
      if (nic.rdma) rank.hca = nic.name + (nic.port > 0 ? ":" + std::to_string(nic.port) : "");
    }
  }

  const Machine& machine_;
  std::vector<RankPlacement> ranks_;
  const RingPieces pieces_;                 // the parts of the job's rings that lie on this host
  std::vector<std::vector<int>> cores_of_;  // [numa index] -> cores
  std::vector<int> nodes_;                  // numa indices with cores
};

// Returns the parts of rings on a host with `count` ranks: whole rings of `context`, or a path that goes on elsewhere.
RingPieces pieces_of(int count, int context) {
  if (count % context != 0) return {{count, false}};
  return RingPieces(count / context, {context, true});
}

Hop make_hop(const std::vector<Machine>& hosts, const RankPlacement& from, const RankPlacement& to) {
  Hop hop{from.rank, to.rank, from.host_index != to.host_index, {}};
  if (hop.other_host) return hop;
  const Machine& machine = hosts[from.host_index];
  if (from.gpu >= 0) {
    hop.link = machine.links[from.gpu][to.gpu];
  } else {
    std::vector<int> numa;
    for (size_t i = 0; i < machine.numa_nodes.size(); ++i) {
      const int id = machine.numa_nodes[i].id;
      if (id == from.numa_node || id == to.numa_node) numa.push_back(static_cast<int>(i));
    }
    hop.link.kind = pci_distance(machine, {}, numa, {}, numa);
  }
  return hop;
}

void check_hosts(const std::vector<Machine>& hosts) {
  if (hosts.empty()) fail("ranks need at least one host, got none");
  for (const Machine& machine : hosts) {
    if (machine.cores.empty() || machine.numa_nodes.empty()) {
      throw Error(ErrorKind::kInternal, "topology", "host " + machine.host + " was described without cores or memory");
    }
  }
}

void check_gpus(const Machine& machine, int ranks) {
  const int gpus = static_cast<int>(machine.gpus.size());
  if (ranks <= gpus) return;
  if (gpus == 0) {
    lack("host " + machine.host + " has no GPU that annulus can see, but " + counted(ranks, "rank") +
         " with device = \"cuda\" " + (ranks == 1 ? "was" : "were") +
         " asked of it; use device = \"cpu\", or a host with GPUs and the NVIDIA driver");
  }
  lack("host " + machine.host + " has " + counted(gpus, "GPU") + ", but " + counted(ranks, "rank") +
       " with device = \"cuda\" were asked of it, and each needs a GPU of its own; use at most " +
       counted(gpus, "rank") + " there, more hosts, or device = \"cpu\"");
}

Placement place_in_order(const std::vector<Machine>& hosts, const std::vector<int>& ranks_per_host,
                         const std::vector<size_t>& order, const PlacementOptions& options) {
  check_hosts(hosts);
  if (ranks_per_host.size() != hosts.size()) {
    throw Error(ErrorKind::kInternal, "topology",
                "rank counts were given for " + std::to_string(ranks_per_host.size()) + " hosts, but machines for " +
                    std::to_string(hosts.size()));
  }
  int64_t total = 0;
  for (size_t h = 0; h < hosts.size(); ++h) {
    if (ranks_per_host[h] < 0) {
      fail("host " + hosts[h].host + " cannot have " + counted(ranks_per_host[h], "rank") + "; use 0 or more");
    }
    total += ranks_per_host[h];
  }
  if (total < 1) fail("a job needs at least 1 rank, got 0; use -n 1 or more");
  if (total > kMaxRanks) fail("a job has at most 65,536 ranks, got " + std::to_string(total));
  if (options.device == DeviceKind::kCuda) {
    for (size_t h = 0; h < hosts.size(); ++h) check_gpus(hosts[h], ranks_per_host[h]);
  }

  const int placed = static_cast<int>(total);
  const int job_ranks = options.job_ranks == 0 ? placed : options.job_ranks;
  Placement placement;
  placement.context = options.context == 0 ? job_ranks : options.context;
  if (placement.context < 1 || job_ranks % placement.context != 0) {
    fail(counted(job_ranks, "rank") + " cannot be divided into rings of " + std::to_string(placement.context) +
         ": use a multiple of it");
  }
  for (size_t h : order) {
    if (ranks_per_host[h] == 0) continue;
    const int first = static_cast<int>(placement.ranks.size());
    HostPlacer placer(hosts[h], pieces_of(ranks_per_host[h], placement.context), ranks_per_host[h]);
    for (RankPlacement& rank : placer.place(options.device)) {
      rank.rank = first + rank.local_rank;
      rank.host_index = static_cast<int>(h);
      placement.oversubscribed = placement.oversubscribed || rank.oversubscribed;
      placement.ranks.push_back(std::move(rank));
    }
  }
  if (placement.context == 1 || job_ranks != placed) return placement;
  for (const RankPlacement& from : placement.ranks) {
    const int begin = from.rank / placement.context * placement.context;
    const int to = begin + (from.rank - begin + 1) % placement.context;
    placement.hops.push_back(make_hop(hosts, from, placement.ranks[to]));
  }
  return placement;
}

}  // namespace

std::string_view to_string(DeviceKind kind) { return kind == DeviceKind::kCuda ? "cuda" : "cpu"; }

Placement place(const std::vector<Machine>& hosts, const std::vector<int>& ranks_per_host,
                const PlacementOptions& options) {
  std::vector<size_t> order(hosts.size());
  std::iota(order.begin(), order.end(), size_t{0});
  return place_in_order(hosts, ranks_per_host, order, options);
}

Placement place(const std::vector<Machine>& hosts, int ranks, const PlacementOptions& options) {
  check_hosts(hosts);
  if (ranks < 1) fail("a job needs at least 1 rank, got " + std::to_string(ranks) + "; use -n 1 or more");
  if (ranks > kMaxRanks) fail("a job has at most 65,536 ranks, got " + std::to_string(ranks));
  const bool cuda = options.device == DeviceKind::kCuda;
  std::vector<int> room;
  int64_t all = 0, gpus = 0;
  for (size_t h = 0; h < hosts.size(); ++h) {
    room.push_back(cuda ? static_cast<int>(hosts[h].gpus.size()) : ranks);
    gpus += room.back();
    if (h < options.slots.size() && options.slots[h] > 0) room.back() = std::min(room.back(), options.slots[h]);
    all += room.back();
  }
  if (cuda && ranks > gpus) {
    if (hosts.size() == 1) check_gpus(hosts.front(), ranks);
    lack(
        "the " + counted(hosts.size(), "host") + " have " + counted(gpus, "GPU") + " together, but " +
        counted(ranks, "rank") + " with device = \"cuda\" were asked for, and each needs a GPU of its own; use " +
        (gpus == 0 ? std::string("device = \"cpu\"") : "-n " + std::to_string(gpus) + " or less, or device = \"cpu\""));
  }
  if (ranks > all) {
    fail(counted(ranks, "rank") + " do not fit into the " + counted(all, "slot") + " of the hosts" +
         (cuda ? " that have a GPU" : "") + "; use -n " + std::to_string(all) + " or less, or hosts with more slots");
  }
  const std::vector<int> counts = deal_ranks(room, ranks, cuda ? options.context : 0);
  return place_in_order(hosts, counts, order_hosts(counts, options.context), options);
}

}  // namespace annulus
