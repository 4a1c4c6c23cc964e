// Property tests of launcher/topology/placement.h: what holds for every machine and every number of ranks.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "common/error.h"
#include "launcher/topology/placement.h"
#include "tests/launcher/topology/machine_xml.h"

namespace annulus::placement_property_test {
namespace {

// RC_ASSERT formats every value that it checks, even if the check passes, which is too slow for so many checks.
void require(bool holds, const char* what) {
  if (!holds) RC_FAIL(what);
}

testing::MadeUpMachine any_machine() {
  testing::MadeUpMachine m;
  m.packages = *rc::gen::inRange(1, 4);
  m.nodes_per_package = *rc::gen::inRange(1, 4);
  m.cores_per_node = *rc::gen::inRange(1, *rc::gen::element(3, 9));  // often too few
  m.threads_per_core = *rc::gen::inRange(1, 4);
  m.gpus = *rc::gen::container<std::vector<int>>(static_cast<size_t>(m.packages), rc::gen::inRange(0, 7));
  m.nics_per_package = *rc::gen::inRange(0, 4);
  return m;
}

// The nodes that a device is near to: one node, the nodes of a package, or all, as on real machines.
std::vector<int> any_near(const Machine& machine) {
  const int node = *rc::gen::inRange(0, static_cast<int>(machine.numa_nodes.size()));
  const int kind = *rc::gen::inRange(0, 3);
  std::vector<int> near;
  for (int n = 0; n < static_cast<int>(machine.numa_nodes.size()); ++n) {
    const bool same_package =
        machine.numa_nodes[static_cast<size_t>(n)].package == machine.numa_nodes[static_cast<size_t>(node)].package;
    if (kind == 2 || (kind == 1 && same_package) || n == node) near.push_back(n);
  }
  return near;
}

// Reads the machine through hwloc and varies it: some processors are removed, as by a cgroup or taskset; some adapters
// have no port that is up or no RDMA; devices are near a node, a package or all; and some pairs of GPUs have NVLink,
// independently of the order of their PCI bus ids.
Machine load(const testing::MadeUpMachine& made_up) {
  Machine machine = Machine::from_xml_text(testing::to_xml(made_up), "made-up");
  const int lost = *rc::gen::inRange(0, static_cast<int>(machine.cores.size()));
  for (int i = 0; i < lost; ++i) {
    machine.cores.erase(machine.cores.begin() + *rc::gen::inRange(0, static_cast<int>(machine.cores.size())));
  }
  // Some cores have fewer hardware threads than others, as in processors with two kinds of cores.
  for (int i = *rc::gen::inRange(0, 3); i > 0; --i) {
    Core& core = machine.cores[static_cast<size_t>(*rc::gen::inRange(0, static_cast<int>(machine.cores.size())))];
    core.pus.resize(static_cast<size_t>(*rc::gen::inRange(1, static_cast<int>(core.pus.size()) + 1)));
  }
  if (*rc::gen::arbitrary<bool>()) machine.cpu_quota = *rc::gen::inRange(1, 100) / 8.0;
  for (Nic& nic : machine.nics) {
    const int kind = *rc::gen::inRange(0, 4);
    nic.active = kind != 0;
    nic.rdma = kind != 1;
    if (kind == 2) nic.numa = any_near(machine);
  }
  if (*rc::gen::arbitrary<bool>()) {
    for (Gpu& gpu : machine.gpus) gpu.numa = any_near(machine);
  }
  if (*rc::gen::arbitrary<bool>()) {
    std::mt19937 random(*rc::gen::arbitrary<unsigned>());
    for (size_t i = 0; i < machine.gpus.size(); ++i) {
      for (size_t j = 0; j < i; ++j) {
        if (random() % 3 != 0) continue;
        machine.links[i][j] = {LinkKind::kNvlink, static_cast<int64_t>(100000 * (1 + random() % 3))};
        machine.links[j][i] = machine.links[i][j];
      }
    }
  }
  return machine;
}

bool meet(const CpuSet& a, const CpuSet& b) {
  return std::any_of(a.pus().begin(), a.pus().end(), [&](int pu) { return b.contains(pu); });
}

CpuSet pus_of(const Machine& machine, int core) { return CpuSet(machine.cores[static_cast<size_t>(core)].pus); }

// One host's part of a placement.
struct Part {
  const Machine& machine;
  std::vector<RankPlacement> ranks;  // by local rank

  int count() const { return static_cast<int>(ranks.size()); }
  int cores() const { return static_cast<int>(machine.cores.size()); }
};

// The indices of the cores of which the rank may use at least one thread.
std::vector<int> cores_of(const Part& part, const RankPlacement& rank) {
  std::vector<int> out;
  for (int c = 0; c < part.cores(); ++c) {
    if (meet(pus_of(part.machine, c), rank.cpus)) out.push_back(c);
  }
  return out;
}

std::vector<int> cores_of_node(const Machine& machine, int node) {
  std::vector<int> out;
  for (size_t c = 0; c < machine.cores.size(); ++c) {
    if (machine.cores[c].numa == node) out.push_back(static_cast<int>(c));
  }
  return out;
}

// Checks each rank by itself: its names agree, and its memory is on the nodes of its processors only.
void check_ranks(const Part& part) {
  const Machine& machine = part.machine;
  const CpuSet allowed = machine.cpus();
  for (const RankPlacement& rank : part.ranks) {
    require(rank.host == machine.host, "a rank names its host");
    require(rank.is_this_system == machine.is_this_system, "a rank records whether its machine is this system");
    require(!rank.cpus.empty() && allowed.contains(rank.cpus), "a rank has processors that are allowed");
    require((rank.device == DeviceKind::kCuda) == (rank.gpu >= 0), "a GPU exactly where the device is cuda");
    require(rank.gpu_pci == (rank.gpu < 0 ? "" : machine.gpus[static_cast<size_t>(rank.gpu)].pci), "its PCI bus id");
    const std::vector<int> cores = cores_of(part, rank);
    require(rank.cores == static_cast<int>(cores.size()), "it counts its cores");
    const double even = machine.cpu_quota / part.count();
    require(rank.threads >= 1 && rank.threads <= rank.cores, "a thread for each core at most");
    require(machine.cpu_quota == 0 || rank.threads <= std::max(1.0, even + 0.5), "threads within the quota");
    require(rank.threads == rank.cores || rank.threads >= even - 0.5, "no fewer than the quota allows");
    require(machine.cpu_quota > 0 || rank.threads == rank.cores, "without a quota as many threads as cores");
    std::set<int> nodes;
    for (int c : cores) nodes.insert(machine.cores[static_cast<size_t>(c)].numa);
    std::set<int> ids;
    for (int node : nodes) ids.insert(machine.numa_nodes[static_cast<size_t>(node)].id);
    require(rank.memory_nodes == std::vector<int>(ids.begin(), ids.end()), "memory of its processors' nodes alone");
    require(ids.contains(rank.numa_node), "its node is one of its processors");
    if (nodes.size() > 1) {
      require(rank.device == DeviceKind::kCpu, "several nodes for CPU ranks alone");
      require(rank.numa_node == machine.numa_nodes[static_cast<size_t>(*nodes.begin())].id,
              "the first of several nodes");
    }
  }
}

// Checks what ranks share: each has whole cores while there are enough; then they share out hardware threads, then
// cores; and always evenly within a node.
void check_sharing(const Part& part) {
  const bool enough = part.count() <= part.cores();
  std::map<int, std::vector<const RankPlacement*>> by_node;
  for (const RankPlacement& rank : part.ranks) by_node[rank.numa_node].push_back(&rank);
  for (const RankPlacement& rank : part.ranks) {
    bool shares = false;
    for (const RankPlacement& other : part.ranks) {
      if (&other == &rank) continue;
      for (int c : cores_of(part, rank)) shares = shares || meet(pus_of(part.machine, c), other.cpus);
      if (enough) require(!meet(rank.cpus, other.cpus), "no processor of two ranks");
    }
    require(!enough || !rank.oversubscribed, "with enough cores no rank shares one");
    require(!shares || rank.oversubscribed, "a rank that shares a core is flagged");
    if (!enough) continue;
    for (int c : cores_of(part, rank)) {
      require(rank.cpus.contains(pus_of(part.machine, c)), "with enough cores a rank has whole ones");
    }
  }
  if (enough && part.ranks.front().device == DeviceKind::kCpu) return;  // check_cpu_nodes has that case
  for (size_t n = 0; n < part.machine.numa_nodes.size(); ++n) {
    const auto found = by_node.find(part.machine.numa_nodes[n].id);
    if (found == by_node.end()) continue;
    const std::vector<const RankPlacement*>& ranks = found->second;
    const std::vector<int> cores = cores_of_node(part.machine, static_cast<int>(n));
    std::set<int> used;
    int least = CpuSet::kMaxPu, most = 0, fewest = CpuSet::kMaxPu, largest = 0;
    size_t pus = 0;
    for (int c : cores) pus += part.machine.cores[static_cast<size_t>(c)].pus.size();
    for (const RankPlacement* rank : ranks) {
      used.insert(rank->cpus.pus().begin(), rank->cpus.pus().end());
      least = std::min(least, rank->cores);
      most = std::max(most, rank->cores);
      fewest = std::min(fewest, rank->cpus.size());
      largest = std::max(largest, rank->cpus.size());
    }
    require(used.size() == pus, "all processors of a node that has ranks are used");
    if (ranks.size() <= cores.size()) {
      require(most - least <= 1, "the cores of a node are divided evenly");
    } else if (ranks.size() <= pus) {
      require(largest - fewest <= 1, "the threads of a node are divided evenly");
    } else {
      for (int c : cores) {
        const auto users =
            static_cast<size_t>(std::count_if(ranks.begin(), ranks.end(), [&](const RankPlacement* rank) {
              return meet(rank->cpus, pus_of(part.machine, c));
            }));
        const size_t threads = part.machine.cores[static_cast<size_t>(c)].pus.size();
        require(users >= threads * (ranks.size() / pus) && users <= threads * ((ranks.size() + pus - 1) / pus),
                "the threads of a node are shared evenly");
      }
    }
  }
}

// Checks where CPU ranks are: in the order of the nodes, with the cores divided evenly or nearly so at borders of
// nodes, or if there are too few, spread over the nodes by their hardware threads.
void check_cpu_nodes(const Part& part) {
  const Machine& machine = part.machine;
  const auto count = static_cast<int64_t>(part.count());
  int last = -1;
  for (const RankPlacement& rank : part.ranks) {
    const int node = machine.cores[static_cast<size_t>(cores_of(part, rank).front())].numa;
    require(node >= last, "ranks follow the nodes");
    last = node;
  }
  if (part.count() <= part.cores()) {
    std::set<int64_t> borders;
    for (int64_t c = 1; c < part.cores(); ++c) {
      if (machine.cores[static_cast<size_t>(c)].numa != machine.cores[static_cast<size_t>(c - 1)].numa)
        borders.insert(c);
    }
    const double even = static_cast<double>(part.cores()) / static_cast<double>(count);
    int64_t before = 0;
    for (int64_t r = 0; r + 1 < count; ++r) {
      const std::vector<int> own = cores_of(part, part.ranks[static_cast<size_t>(r)]);
      require(own.front() == before && own.back() + 1 - own.front() == static_cast<int>(own.size()),
              "the cores of a rank follow those of the rank before");
      before += static_cast<int64_t>(own.size());
      const double off = static_cast<double>(before) - static_cast<double>(r + 1) * even;
      require(std::abs(off) <= (borders.contains(before) ? std::max(0.5, even / 8) : 0.5) + 1e-9, "evenly divided");
      for (const int64_t border : borders) {
        const double away = std::abs(static_cast<double>(border) - static_cast<double>(r + 1) * even);
        require(away > std::max(0.5, even / 8) - 1e-9 || (borders.contains(before) && std::abs(off) <= away + 1e-9),
                "at a border of a node that is near");
      }
    }
    require(cores_of(part, part.ranks.back()).front() == before &&
                cores_of(part, part.ranks.back()).back() == part.cores() - 1,
            "the last rank has the rest");
    return;
  }
  // No rank would share its hardware threads with fewer ranks on another node.
  std::map<int, int64_t> taken;
  for (const RankPlacement& rank : part.ranks) ++taken[rank.numa_node];
  std::map<int, int64_t> threads;  // by node with cores
  for (const Core& core : machine.cores) {
    threads[machine.numa_nodes[static_cast<size_t>(core.numa)].id] += static_cast<int64_t>(core.pus.size());
  }
  for (const auto& [here, own] : threads) {
    require(taken[here] >= 1, "no node is left idle");
    for (const auto& [there, others] : threads) {
      require(taken[here] == 1 || others * taken[here] <= own * (taken[there] + 1),
              "ranks are spread in proportion to the hardware threads");
    }
  }
}

// Checks that GPU ranks are near their GPUs while a core is left there.
void check_gpu_nodes(const Part& part) {
  const Machine& machine = part.machine;
  std::set<int> gpus;
  std::map<int, int> taken;  // node index -> ranks
  const auto index_of = [&](const RankPlacement& rank) {
    for (size_t n = 0; n < machine.numa_nodes.size(); ++n) {
      if (machine.numa_nodes[n].id == rank.numa_node) return static_cast<int>(n);
    }
    return -1;
  };
  for (const RankPlacement& rank : part.ranks) {
    require(gpus.insert(rank.gpu).second, "a GPU for each rank");
    ++taken[index_of(rank)];
  }
  const auto cores = [&](int node) { return static_cast<int>(cores_of_node(machine, node).size()); };
  const auto threads = [&](int node) {
    int count = 0;
    for (int core : cores_of_node(machine, node)) {
      count += static_cast<int>(machine.cores[static_cast<size_t>(core)].pus.size());
    }
    return count;
  };
  // Nodes near a rank's GPU that have cores.
  const auto choices = [&](const RankPlacement& rank) {
    std::vector<int> nodes;
    for (int node : machine.gpus[static_cast<size_t>(rank.gpu)].numa) {
      if (cores(node) > 0) nodes.push_back(node);
    }
    return nodes;
  };
  for (const RankPlacement& rank : part.ranks) {
    const int own = index_of(rank);
    const std::vector<int> own_choices = choices(rank);
    if (part.count() <= part.cores() && !own_choices.empty() &&
        std::find(own_choices.begin(), own_choices.end(), own) == own_choices.end()) {
      for (const RankPlacement& other : part.ranks) {
        if (std::find(own_choices.begin(), own_choices.end(), index_of(other)) == own_choices.end()) continue;
        const size_t theirs = choices(other).size();
        require(theirs != 0 && theirs <= own_choices.size(),
                "a rank with a choice of nodes leaves cores to ranks with less choice");
      }
    }
    const std::vector<int>& near = machine.gpus[static_cast<size_t>(rank.gpu)].numa;
    std::set<int> packages;
    if (own_choices.empty()) continue;
    for (int node : own_choices) packages.insert(machine.numa_nodes[static_cast<size_t>(node)].package);
    const auto distance = [&](int node) {
      if (std::find(near.begin(), near.end(), node) != near.end()) return 0;
      return packages.contains(machine.numa_nodes[static_cast<size_t>(node)].package) ? 1 : 2;
    };
    for (size_t n = 0; n < machine.numa_nodes.size(); ++n) {
      const int node = static_cast<int>(n);
      if (cores(node) == 0 || node == own) continue;
      if (distance(node) < distance(own)) {
        require(taken[node] >= cores(node), "no rank is farther from its GPU than a core that is left");
      }
      if (taken[own] > cores(own)) require(taken[node] >= cores(node), "no rank shares a core while one is left");
      if (taken[own] > threads(own)) {
        require(taken[node] >= threads(node), "no rank shares a hardware thread while one is left");
      }
    }
  }
}

// Checks the NIC of each rank against the definition, in the order of the ranks.
void check_nics(const Part& part) {
  const Machine& machine = part.machine;
  std::vector<int> used(machine.nics.size(), 0);
  for (const RankPlacement& rank : part.ranks) {
    require((rank.nic >= 0) == !machine.nics.empty(), "a NIC exactly where there are some");
    if (machine.nics.empty()) continue;
    std::vector<int> numa;
    if (rank.gpu >= 0) numa = machine.gpus[static_cast<size_t>(rank.gpu)].numa;
    for (size_t n = 0; n < machine.numa_nodes.size() && rank.gpu < 0; ++n) {
      if (machine.numa_nodes[n].id == rank.numa_node) numa.push_back(static_cast<int>(n));
    }
    const PciPath path = rank.gpu < 0 ? PciPath{} : machine.gpus[static_cast<size_t>(rank.gpu)].path;
    const auto merit = [&](size_t i) {
      const Nic& nic = machine.nics[i];
      return std::tuple(nic.active, nic.rdma, -static_cast<int>(pci_distance(machine, path, numa, nic.path, nic.numa)),
                        nic.numa == numa, -used[i]);
    };
    const auto own = static_cast<size_t>(rank.nic);
    for (size_t i = 0; i < machine.nics.size(); ++i) require(merit(own) >= merit(i), "no other NIC is better");
    require(rank.nic_name == machine.nics[own].name, "its NIC's name");
    ++used[own];
  }
}

// Checks that no other choice and order of the host's GPUs makes faster rings, or a faster path if they are not whole
// rings. All orders are tried if there are few GPUs, and some otherwise.
void check_order(const Part& part, int context) {
  const Machine& machine = part.machine;
  const bool whole = part.count() % context == 0;
  const auto worth = [&](const std::vector<int>& gpus) {
    int64_t slowest = std::numeric_limits<int64_t>::max(), sum = 0;
    for (int i = 0; i < part.count() && context > 1; ++i) {
      const int next = !whole || (i + 1) % context != 0 ? i + 1 : i + 1 - context;
      if (next >= part.count()) continue;
      const auto from = static_cast<size_t>(gpus[static_cast<size_t>(i)]);
      const auto to = static_cast<size_t>(gpus[static_cast<size_t>(next)]);
      slowest = std::min(slowest, machine.links[from][to].megabytes_per_s);
      sum += machine.links[from][to].megabytes_per_s;
    }
    return std::pair(slowest, sum);
  };
  std::vector<int> placed;
  for (const RankPlacement& rank : part.ranks) placed.push_back(rank.gpu);
  const auto reached = worth(placed);
  std::vector<int> other(machine.gpus.size());
  std::iota(other.begin(), other.end(), 0);
  require(reached >= worth(other), "the order of the PCI bus ids makes no faster rings");
  if (other.size() > 9) return;  // for more GPUs only some orders are searched, including that of the bus ids
  if (other.size() <= 6) {
    while (std::next_permutation(other.begin(), other.end())) {
      require(reached >= worth(other), "no other order of the GPUs makes faster rings");
    }
    return;
  }
  std::mt19937 random(11);
  for (int trial = 0; trial < 200; ++trial) {
    std::shuffle(other.begin(), other.end(), random);
    require(reached >= worth(other), "no other order of the GPUs makes faster rings");
  }
}

void check_hops(const std::vector<Machine>& hosts, const Placement& p) {
  const auto total = static_cast<int>(p.ranks.size());
  require(p.hops.size() == (p.context > 1 ? p.ranks.size() : 0), "a hop from each rank of a ring");
  for (size_t i = 0; i < p.hops.size(); ++i) {
    const Hop& hop = p.hops[i];
    require(hop.from == static_cast<int>(i), "hops are by rank");
    const bool last = (hop.from + 1) % p.context == 0;
    require(hop.to == (last ? hop.from + 1 - p.context : hop.from + 1) && hop.to < total, "a ring's next rank");
    const RankPlacement& from = p.ranks[i];
    const RankPlacement& to = p.ranks[static_cast<size_t>(hop.to)];
    require(hop.other_host == (from.host_index != to.host_index), "a hop to another host says so");
    if (hop.other_host) continue;
    const Machine& machine = hosts[static_cast<size_t>(from.host_index)];
    if (from.gpu >= 0) {
      require(hop.link == machine.links[static_cast<size_t>(from.gpu)][static_cast<size_t>(to.gpu)], "the GPUs' link");
      continue;
    }
    std::set<int> packages;
    for (const NumaNode& node : machine.numa_nodes) {
      if (node.id == from.numa_node || node.id == to.numa_node) packages.insert(node.package);
    }
    require((hop.link.kind == LinkKind::kPackage) == (packages.size() == 1), "within a package or between");
  }
}

void check(const std::vector<Machine>& hosts, const std::vector<int>& counts, DeviceKind device) {
  const int total = std::accumulate(counts.begin(), counts.end(), 0);
  std::vector<int> contexts;
  for (int c = 1; c <= total; ++c) {
    if (total % c == 0) contexts.push_back(c);
  }
  const int context = *rc::gen::elementOf(contexts);
  const Placement p = place(hosts, counts, {.device = device, .context = context});
  require(static_cast<int>(p.ranks.size()) == total, "all ranks are placed");
  require(p.context == context, "rings as long as asked for");

  size_t next = 0;
  bool oversubscribed = false;
  for (size_t h = 0; h < hosts.size(); ++h) {
    Part part{hosts[h], {}};
    for (int local = 0; local < counts[h]; ++local, ++next) {
      const RankPlacement& rank = p.ranks[next];
      require(rank.rank == static_cast<int>(next), "ranks by number");
      require(rank.host_index == static_cast<int>(h), "hosts in their order");
      require(rank.local_rank == local, "local ranks by number");
      require(rank.device == device, "the device asked for");
      oversubscribed = oversubscribed || rank.oversubscribed;
      part.ranks.push_back(rank);
    }
    if (counts[h] == 0) continue;
    check_ranks(part);
    check_sharing(part);
    check_nics(part);
    if (device == DeviceKind::kCuda) {
      check_gpu_nodes(part);
      check_order(part, context);
    } else {
      check_cpu_nodes(part);
    }
    if (part.count() > part.cores()) require(p.oversubscribed, "more ranks than cores are flagged");
    // A rank that knows only its own host finds the same placement.
    const Placement alone =
        place({hosts[h]}, std::vector<int>{counts[h]}, {.device = device, .context = context, .job_ranks = total});
    for (int local = 0; local < counts[h]; ++local) {
      const RankPlacement& seen = alone.ranks[static_cast<size_t>(local)];
      const RankPlacement& rank = part.ranks[static_cast<size_t>(local)];
      require(seen.gpu == rank.gpu && seen.cpus == rank.cpus && seen.nic == rank.nic &&
                  seen.memory_nodes == rank.memory_nodes,
              "a host placed by itself is placed alike");
    }
  }
  require(p.oversubscribed == oversubscribed, "flagged exactly where a rank is");
  check_hops(hosts, p);
}

RC_GTEST_PROP(PlacementProperty, CpuRanksArePlacedByTheRules, ()) {
  const Machine machine = load(any_machine());
  check({machine}, {*rc::gen::inRange(1, 40)}, DeviceKind::kCpu);
}

RC_GTEST_PROP(PlacementProperty, GpuRanksArePlacedByTheRules, ()) {
  const Machine machine = load(any_machine());
  RC_PRE(!machine.gpus.empty());
  check({machine}, {*rc::gen::inRange(1, static_cast<int>(machine.gpus.size()) + 1)}, DeviceKind::kCuda);
}

RC_GTEST_PROP(PlacementProperty, RanksOfSeveralHostsArePlacedByTheRules, ()) {
  std::vector<Machine> hosts;
  std::vector<int> counts;
  const DeviceKind device = *rc::gen::element(DeviceKind::kCpu, DeviceKind::kCuda);
  for (int h = *rc::gen::inRange(1, 4); h > 0; --h) {
    hosts.push_back(load(any_machine()));
    const int most = device == DeviceKind::kCuda ? static_cast<int>(hosts.back().gpus.size()) : 12;
    counts.push_back(*rc::gen::inRange(0, most + 1));
  }
  RC_PRE(std::any_of(counts.begin(), counts.end(), [](int n) { return n > 0; }));
  check(hosts, counts, device);
}

}  // namespace
}  // namespace annulus::placement_property_test
