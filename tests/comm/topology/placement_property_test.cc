// What holds for every machine and every number of ranks.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "comm/topology/placement.h"
#include "common/error.h"
#include "tests/comm/topology/machine_xml.h"

namespace annulus {
namespace {

// RC_ASSERT writes down every value it sees, also of what holds: too slow for so many.
void require(bool holds, const char* what) {
  if (!holds) RC_FAIL(what);
}

testing::MadeUpMachine any_machine() {
  testing::MadeUpMachine m;
  m.packages = *rc::gen::inRange(1, 4);
  m.nodes_per_package = *rc::gen::inRange(1, 4);
  m.cores_per_node = *rc::gen::inRange(1, 9);
  m.threads_per_core = *rc::gen::inRange(1, 4);
  m.gpus = *rc::gen::container<std::vector<int>>(static_cast<size_t>(m.packages), rc::gen::inRange(0, 7));
  m.nics_per_package = *rc::gen::inRange(0, 4);
  return m;
}

// Read through hwloc, then some processors taken away, as a cgroup or taskset does.
Machine load(const testing::MadeUpMachine& made_up) {
  Machine machine = Machine::from_xml_text(testing::to_xml(made_up), "made-up");
  const int lost = *rc::gen::inRange(0, static_cast<int>(machine.cores.size()));
  for (int i = 0; i < lost; ++i) {
    machine.cores.erase(machine.cores.begin() + *rc::gen::inRange(0, static_cast<int>(machine.cores.size())));
  }
  return machine;
}

void check(const std::vector<Machine>& hosts, const std::vector<int>& counts, DeviceKind device) {
  const Placement p = place(hosts, counts, {device});
  size_t total = 0;
  for (int n : counts) total += static_cast<size_t>(n);
  require(p.ranks.size() == total, "p.ranks.size() == total");

  size_t next = 0;
  bool oversubscribed = false;
  for (size_t h = 0; h < hosts.size(); ++h) {
    const Machine& machine = hosts[h];
    const CpuSet allowed = machine.cpus();
    const bool enough = counts[h] <= static_cast<int>(machine.cores.size());
    std::set<std::string> gpus;
    std::vector<int> users(static_cast<size_t>(CpuSet::kMaxPu) + 1, 0);
    for (int local = 0; local < counts[h]; ++local, ++next) {
      const RankPlacement& rank = p.ranks[next];
      require(rank.rank == static_cast<int>(next), "rank.rank == static_cast<int>(next)");
      require(rank.host_index == static_cast<int>(h), "rank.host_index == static_cast<int>(h)");
      require(rank.local_rank == local, "rank.local_rank == local");
      require(!rank.cpus.empty(), "!rank.cpus.empty()");
      require(allowed.contains(rank.cpus), "allowed.contains(rank.cpus)");
      require(rank.threads >= 1, "rank.threads >= 1");
      require(!rank.memory_nodes.empty(), "!rank.memory_nodes.empty()");
      require(rank.memory_nodes.front() <= rank.numa_node, "rank.memory_nodes.front() <= rank.numa_node");
      require((rank.nic >= 0) == !machine.nics.empty(), "(rank.nic >= 0) == !machine.nics.empty()");
      for (int pu : rank.cpus.pus()) ++users[static_cast<size_t>(pu)];
      oversubscribed = oversubscribed || rank.oversubscribed;
      if (device == DeviceKind::kCuda) require(gpus.insert(rank.gpu_pci).second, "gpus.insert(rank.gpu_pci).second");

      // The memory is that of the processors, and with enough cores a rank has whole ones.
      int cores = 0;
      for (const Core& core : machine.cores) {
        const CpuSet pus(core.pus);
        if (!pus.intersects(rank.cpus)) continue;
        ++cores;
        const int node = machine.numa_nodes[static_cast<size_t>(core.numa)].id;
        require(std::find(rank.memory_nodes.begin(), rank.memory_nodes.end(), node) != rank.memory_nodes.end(),
                "std::find(rank.memory_nodes.begin(), rank.memory_nodes.end(), node) != rank.memory_nodes.end()");
        if (enough) require(rank.cpus.contains(pus), "rank.cpus.contains(pus)");
      }
      require(rank.threads == cores, "rank.threads == cores");
    }
    if (enough)
      require(*std::max_element(users.begin(), users.end()) <= 1, "*std::max_element(users.begin(), users.end()) <= 1");
    if (device == DeviceKind::kCpu && counts[h] > 0 && enough) {  // nothing is left idle
      require(std::count(users.begin(), users.end(), 1) == allowed.size(),
              "std::count(users.begin(), users.end(), 1) == allowed.size()");
    }
  }
  require(p.oversubscribed == oversubscribed, "p.oversubscribed == oversubscribed");
  for (size_t h = 0; h < hosts.size(); ++h) {
    if (counts[h] > static_cast<int>(hosts[h].cores.size())) require(oversubscribed, "oversubscribed");
  }

  // The ring: each rank once, the ranks of a host together, every hop from one to the next.
  std::vector<int> sorted = p.ring;
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 0; i < sorted.size(); ++i)
    require(sorted[i] == static_cast<int>(i), "sorted[i] == static_cast<int>(i)");
  require(p.ring.size() == total, "p.ring.size() == total");
  int last_host = -1;
  for (int r : p.ring) {
    require(p.ranks[static_cast<size_t>(r)].host_index >= last_host,
            "p.ranks[static_cast<size_t>(r)].host_index >= last_host");
    last_host = p.ranks[static_cast<size_t>(r)].host_index;
  }
  require(p.hops.size() == (total > 1 ? total : 0), "p.hops.size() == (total > 1 ? total : 0)");
  for (size_t i = 0; i < p.hops.size(); ++i) {
    require(p.hops[i].from == p.ring[i], "p.hops[i].from == p.ring[i]");
    require(p.hops[i].to == p.ring[(i + 1) % total], "p.hops[i].to == p.ring[(i + 1) % total]");
  }
}

RC_GTEST_PROP(PlacementProperty, CpuRanks, ()) {
  const Machine machine = load(any_machine());
  check({machine}, {*rc::gen::inRange(1, 40)}, DeviceKind::kCpu);
}

RC_GTEST_PROP(PlacementProperty, GpuRanks, ()) {
  const Machine machine = load(any_machine());
  RC_PRE(!machine.gpus.empty());
  check({machine}, {*rc::gen::inRange(1, static_cast<int>(machine.gpus.size()) + 1)}, DeviceKind::kCuda);
}

RC_GTEST_PROP(PlacementProperty, SeveralHosts, ()) {
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

// A total is divided evenly: no host could give a rank to another that has room and two fewer.
RC_GTEST_PROP(PlacementProperty, TotalsAreDividedEvenly, ()) {
  std::vector<Machine> hosts;
  int gpus = 0;
  for (int h = *rc::gen::inRange(1, 6); h > 0; --h) {
    std::vector<std::string> ids;
    for (int g = *rc::gen::inRange(0, 10); g > 0; --g) ids.push_back(std::to_string(g) + ":00.0");
    hosts.push_back(Machine::from_synthetic("pack:2 [numa] core:4 pu:1"));
    hosts.back().set_visible_gpus(ids);
    gpus += static_cast<int>(ids.size());
  }
  RC_PRE(gpus > 0);
  const int ranks = *rc::gen::inRange(1, gpus + 1);
  const Placement p = place(hosts, ranks, {DeviceKind::kCuda});
  std::vector<int> counts(hosts.size(), 0);
  for (const RankPlacement& rank : p.ranks) ++counts[static_cast<size_t>(rank.host_index)];
  const int most = *std::max_element(counts.begin(), counts.end());
  for (size_t h = 0; h < hosts.size(); ++h) {
    require(counts[h] >= most - 1 || counts[h] == static_cast<int>(hosts[h].gpus.size()),
            "counts[h] >= most - 1 || counts[h] == static_cast<int>(hosts[h].gpus.size())");
  }
  require(static_cast<int>(p.ranks.size()) == ranks, "static_cast<int>(p.ranks.size()) == ranks");
}

}  // namespace
}  // namespace annulus
