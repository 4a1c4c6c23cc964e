// See placement.h.
#include "topology/placement.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

#include "common/error.h"
#include "common/text.h"
#include "topology/ring_order.h"

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
      : machine_(machine), ranks_(static_cast<size_t>(count)), pieces_(std::move(pieces)) {
    cores_of_.resize(machine.numa_nodes.size());
    for (size_t i = 0; i < machine.cores.size(); ++i) {
      cores_of_[static_cast<size_t>(machine.cores[i].numa)].push_back(static_cast<int>(i));
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
    choose_nics();
    return std::move(ranks_);
  }

 private:
  int cores(int node) const { return static_cast<int>(cores_of_[static_cast<size_t>(node)].size()); }

  void place_gpus() {
    const GpuGraph graph = graph_of(machine_);
    const std::vector<int> gpus = best_ring_order(graph, best_members(graph, pieces_), pieces_);
    for (size_t i = 0; i < ranks_.size(); ++i) {
      ranks_[i].gpu = gpus[i];
      ranks_[i].gpu_pci = machine_.gpus[static_cast<size_t>(gpus[i])].pci;
    }

    // Ranks whose GPU is near only one node choose first; those with a choice come later and even the nodes out.
    std::vector<std::vector<int>> members(machine_.numa_nodes.size());
    std::vector<size_t> by_choice(ranks_.size());
    std::iota(by_choice.begin(), by_choice.end(), size_t{0});
    std::stable_sort(by_choice.begin(), by_choice.end(),
                     [&](size_t a, size_t b) { return near_nodes(ranks_[a]).size() < near_nodes(ranks_[b]).size(); });
    for (size_t r : by_choice) {
      const std::vector<int> near = near_nodes(ranks_[r]);
      members[static_cast<size_t>(choose_node(near, members))].push_back(static_cast<int>(r));
    }
    for (int node : nodes_) {
      auto& list = members[static_cast<size_t>(node)];
      std::sort(list.begin(), list.end());
      divide(node, list);
    }
  }

  // Returns the nodes with cores near the rank's GPU, or all nodes with cores if there are none.
  std::vector<int> near_nodes(const RankPlacement& rank) const {
    std::vector<int> near;
    for (int node : machine_.gpus[static_cast<size_t>(rank.gpu)].numa) {
      if (cores(node) > 0) near.push_back(node);
    }
    return near.empty() ? nodes_ : near;
  }

  // Chooses the node for one more rank: a near node with a core left, else the nearest with one left, else a near one.
  int choose_node(const std::vector<int>& near, const std::vector<std::vector<int>>& members) const {
    std::set<int> packages;
    for (int node : near) packages.insert(machine_.numa_nodes[static_cast<size_t>(node)].package);
    int best = nodes_.front();
    std::tuple<int, double, int> best_cost{9, 0, 0};
    for (int node : nodes_) {
      const int taken = static_cast<int>(members[static_cast<size_t>(node)].size());
      const bool is_near = std::find(near.begin(), near.end(), node) != near.end();
      const bool same_package = packages.contains(machine_.numa_nodes[static_cast<size_t>(node)].package);
      const bool room = taken < cores(node);
      const int distance = is_near ? 0 : same_package ? 1 : 2;
      const std::tuple<int, double, int> cost{room ? distance : 3 + distance,
                                              (taken + 1.0) / static_cast<double>(cores(node)), node};
      if (cost < best_cost) {
        best_cost = cost;
        best = node;
      }
    }
    return best;
  }

  void place_cpus() {
    const int n = static_cast<int>(ranks_.size());
    const int node_count = static_cast<int>(nodes_.size());
    const int total = static_cast<int>(machine_.cores.size());
    if (n < node_count) {
      // Each rank gets one or more whole nodes; the cuts divide the cores as evenly as that allows.
      int begin = 0;
      int before = 0;  // cores of nodes already given
      for (int r = 0; r < n; ++r) {
        int end = begin + 1;
        int sum = before + cores(nodes_[static_cast<size_t>(begin)]);
        while (end < node_count - (n - 1 - r)) {
          const int next = cores(nodes_[static_cast<size_t>(end)]);
          // Leave out the next node if more than half of it lies beyond this rank's even share.
          if (r + 1 < n && int64_t{2} * sum + next > int64_t{2} * share(r + 1, total, n)) break;
          sum += next;
          ++end;
        }
        give_nodes(ranks_[static_cast<size_t>(r)], {nodes_.begin() + begin, nodes_.begin() + end});
        begin = end;
        before = sum;
      }
      return;
    }
    // Each node gets one rank; the others go one by one to the node with the most cores per rank.
    std::vector<int> count(nodes_.size(), 1);
    for (int left = n - node_count; left > 0; --left) {
      size_t best = 0;
      for (size_t i = 1; i < nodes_.size(); ++i) {
        if (int64_t{cores(nodes_[i])} * (count[best] + 1) > int64_t{cores(nodes_[best])} * (count[i] + 1)) best = i;
      }
      ++count[best];
    }
    int r = 0;
    for (size_t i = 0; i < nodes_.size(); ++i) {
      std::vector<int> list(static_cast<size_t>(count[i]));
      std::iota(list.begin(), list.end(), r);
      r += count[i];
      divide(nodes_[i], list);
    }
  }

  void give_nodes(RankPlacement& rank, const std::vector<int>& nodes) {
    std::vector<int> all;
    rank.threads = 0;
    for (int node : nodes) {
      for (int c : cores_of_[static_cast<size_t>(node)]) add_pus(all, c);
      rank.memory_nodes.push_back(machine_.numa_nodes[static_cast<size_t>(node)].id);
      rank.threads += cores(node);
    }
    rank.numa_node = rank.memory_nodes.front();
    rank.cpus = CpuSet(std::move(all));
    std::sort(rank.memory_nodes.begin(), rank.memory_nodes.end());
  }

  void add_pus(std::vector<int>& out, int core) const {
    const auto& pus = machine_.cores[static_cast<size_t>(core)].pus;
    out.insert(out.end(), pus.begin(), pus.end());
  }

  // Divides the cores of a node among the local ranks in `list`.
  void divide(int node, const std::vector<int>& list) {
    const std::vector<int>& own = cores_of_[static_cast<size_t>(node)];
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
      RankPlacement& rank = ranks_[static_cast<size_t>(list[static_cast<size_t>(i)])];
      rank.numa_node = machine_.numa_nodes[static_cast<size_t>(node)].id;
      rank.memory_nodes = {rank.numa_node};
      std::vector<int> mine;
      if (k <= c) {
        const int begin = share(i, c, k);
        const int end = share(i + 1, c, k);
        for (int j = begin; j < end; ++j) add_pus(mine, own[static_cast<size_t>(j)]);
        rank.threads = end - begin;
      } else if (k <= p) {
        std::set<int> touched;
        for (int j = share(i, p, k); j < share(i + 1, p, k); ++j) {
          mine.push_back(pus[static_cast<size_t>(j)]);
          touched.insert(core_of_pu[static_cast<size_t>(j)]);
        }
        rank.threads = static_cast<int>(touched.size());
        rank.oversubscribed = true;
      } else {
        add_pus(mine, own[static_cast<size_t>(share(i, c, k))]);
        rank.oversubscribed = true;
      }
      rank.cpus = CpuSet(std::move(mine));
    }
  }

  void choose_nics() {
    if (machine_.nics.empty()) return;
    std::vector<int> used(machine_.nics.size(), 0);
    for (RankPlacement& rank : ranks_) {
      std::vector<int> numa;
      PciPath path;
      if (rank.gpu >= 0) {
        numa = machine_.gpus[static_cast<size_t>(rank.gpu)].numa;
        path = machine_.gpus[static_cast<size_t>(rank.gpu)].path;
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
      ++used[static_cast<size_t>(best)];
      rank.nic = best;
      const Nic& nic = machine_.nics[static_cast<size_t>(best)];
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
  return RingPieces(static_cast<size_t>(count / context), {context, true});
}

Hop make_hop(const std::vector<Machine>& hosts, const RankPlacement& from, const RankPlacement& to) {
  Hop hop{from.rank, to.rank, from.host_index != to.host_index, {}};
  if (hop.other_host) return hop;
  const Machine& machine = hosts[static_cast<size_t>(from.host_index)];
  if (from.gpu >= 0) {
    hop.link = machine.links[static_cast<size_t>(from.gpu)][static_cast<size_t>(to.gpu)];
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

// Deals `ranks` out over hosts with `room` as evenly as possible; the first hosts get the remainder.
std::vector<int> even_shares(const std::vector<int>& room, int ranks) {
  std::vector<int> counts(room.size(), 0);
  for (int left = ranks; left > 0;) {
    int open = 0;
    for (size_t h = 0; h < room.size(); ++h) open += counts[h] < room[h] ? 1 : 0;
    const int base = std::max(1, left / open);
    for (size_t h = 0; h < room.size() && left > 0; ++h) {
      const int more = std::min({base, room[h] - counts[h], left});
      counts[h] += more;
      left -= more;
    }
  }
  return counts;
}

// Returns `room` with 0 for the hosts that `ranks` ranks do not need: the ones with the least room.
std::vector<int> fewest_hosts(std::vector<int> room, int ranks) {
  std::vector<size_t> order(room.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return room[a] > room[b]; });
  int64_t sum = 0;
  for (size_t h : order) {
    if (sum >= ranks) room[h] = 0;
    sum += room[h];
  }
  return room;
}

// Counts the hops between hosts in all rings together: a ring on several hosts has one for each of them.
int crossings(const std::vector<int>& ranks_per_host, const std::vector<size_t>& order, int context) {
  int64_t before = 0;
  int count = 0;
  bool cut = false;  // whether the current, incomplete ring already crosses a boundary between hosts
  for (size_t h : order) {
    if (ranks_per_host[h] == 0) continue;
    const int64_t after = before + ranks_per_host[h];
    if (before % context != 0) {
      count += cut ? 1 : 2;
      cut = after / context == before / context;
    }
    before = after;
  }
  return count;
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
    placement.hops.push_back(make_hop(hosts, from, placement.ranks[static_cast<size_t>(to)]));
  }
  return placement;
}

}  // namespace

std::string_view to_string(DeviceKind kind) { return kind == DeviceKind::kCuda ? "cuda" : "cpu"; }

std::vector<int> deal_ranks(const std::vector<int>& room, int ranks, int context) {
  const int64_t all = std::accumulate(room.begin(), room.end(), int64_t{0});
  if (ranks < 1 || ranks > all) {
    fail(counted(ranks, "rank") + " cannot be dealt out to " + counted(static_cast<int64_t>(room.size()), "host") +
         " with room for " + std::to_string(all));
  }
  if (context < 1) return even_shares(room, ranks);
  std::vector<int> whole;  // number of whole rings that fit on each host
  for (int r : room) whole.push_back(r / context);
  const int64_t fit = std::accumulate(whole.begin(), whole.end(), int64_t{0});
  std::vector<int> counts = even_shares(whole, static_cast<int>(std::min<int64_t>(fit, ranks / context)));
  std::vector<int> left;
  for (size_t h = 0; h < room.size(); ++h) {
    counts[h] *= context;
    left.push_back(room[h] - counts[h]);
  }
  const int rest = ranks - std::accumulate(counts.begin(), counts.end(), 0);
  const std::vector<int> more = even_shares(fewest_hosts(left, rest), rest);
  for (size_t h = 0; h < room.size(); ++h) counts[h] += more[h];
  return counts;
}

std::vector<size_t> order_hosts(const std::vector<int>& ranks_per_host, int context) {
  std::vector<size_t> own(ranks_per_host.size());
  std::iota(own.begin(), own.end(), size_t{0});
  if (context < 2 || crossings(ranks_per_host, own, context) == 0) return own;
  // While a ring is incomplete, the next host is the one that leaves the least of it to others, and of several such
  // hosts the one with the fewest ranks.
  std::vector<size_t> left = own, order;
  for (int open = 0; !left.empty();) {
    const auto rest = [&](size_t h) { return (open + ranks_per_host[h]) % context; };
    const auto missing = [&](size_t h) {
      return open == 0 ? std::pair(0, 0) : std::pair((context - rest(h)) % context, ranks_per_host[h]);
    };
    const auto next =
        std::min_element(left.begin(), left.end(), [&](size_t a, size_t b) { return missing(a) < missing(b); });
    order.push_back(*next);
    open = rest(*next);
    left.erase(next);
  }
  return crossings(ranks_per_host, order, context) < crossings(ranks_per_host, own, context) ? order : own;
}

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
        "the " + counted(static_cast<int64_t>(hosts.size()), "host") + " have " + counted(gpus, "GPU") +
        " together, but " + counted(ranks, "rank") +
        " with device = \"cuda\" were asked for, and each needs a GPU of its own; use " +
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
