// Tests of placements over several hosts (launcher/topology/placement.h) by counting hops between hosts: on described
// machines, and on small ones in comparison with every possible assignment.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "launcher/topology/placement.h"
#include "launcher/topology/ring_order.h"
#include "tests/launcher/topology/machine_xml.h"

namespace annulus::placement_hosts_test {
namespace {

Machine load(const std::string& name) { return Machine::from_xml("tests/launcher/topology/testdata/" + name); }

Machine made_up(const testing::MadeUpMachine& machine) {
  return Machine::from_xml_text(testing::to_xml(machine), "made-up");
}

PlacementOptions cuda(int context) { return {.device = DeviceKind::kCuda, .context = context}; }

// The number of hops between hosts; checks that each ring enters and leaves each of its hosts at most once.
int crossings(const Placement& placement) {
  std::map<std::pair<int, int>, int> in, out;  // (ring, host)
  int count = 0;
  std::map<int, std::set<int>> hosts;
  for (const Hop& hop : placement.hops) {
    const int ring = hop.from / placement.context;
    const int from = placement.ranks[static_cast<size_t>(hop.from)].host_index;
    const int to = placement.ranks[static_cast<size_t>(hop.to)].host_index;
    EXPECT_EQ(hop.other_host, from != to);
    hosts[ring].insert(from);
    if (from == to) continue;
    EXPECT_EQ(++out[std::pair(ring, from)], 1) << "ring " << ring << " leaves host " << from << " again";
    EXPECT_EQ(++in[std::pair(ring, to)], 1) << "ring " << ring << " enters host " << to << " again";
    ++count;
  }
  int expected = 0;
  for (const auto& [ring, of_ring] : hosts) expected += of_ring.size() > 1 ? static_cast<int>(of_ring.size()) : 0;
  EXPECT_EQ(count, expected);
  return count;
}

std::vector<int> counts(const Placement& placement, size_t hosts) {
  std::vector<int> out(hosts, 0);
  for (const RankPlacement& rank : placement.ranks) ++out[static_cast<size_t>(rank.host_index)];
  return out;
}

TEST(PlacementHosts, RingsOnTwoNodesOfEight) {
  const std::vector<Machine> hosts(2, load("dgx.xml"));
  EXPECT_EQ(crossings(place(hosts, 16, cuda(16))), 2);
  EXPECT_EQ(crossings(place(hosts, 16, cuda(8))), 0);
  EXPECT_EQ(crossings(place(hosts, 16, cuda(2))), 0);
  EXPECT_EQ(crossings(place(hosts, std::vector<int>{6, 6}, cuda(4))), 2) << "only the middle ring crosses";
  const Placement whole = place(hosts, 12, cuda(4));
  EXPECT_EQ(counts(whole, 2), (std::vector<int>{8, 4})) << "6 and 6 would cut a ring";
  EXPECT_EQ(crossings(whole), 0);
  EXPECT_EQ(counts(place(hosts, 12, cuda(0)), 2), (std::vector<int>{6, 6}));
}

TEST(PlacementHosts, RingsOnOneSocketNodes) {
  const std::vector<Machine> hosts(3, load("one_socket_gpus.xml"));
  EXPECT_EQ(crossings(place(hosts, 12, cuda(12))), 3);
  EXPECT_EQ(crossings(place(hosts, 12, cuda(6))), 4);
  EXPECT_EQ(crossings(place(hosts, 12, cuda(4))), 0);
  // Rings within a host use NVLink.
  for (const Hop& hop : place(hosts, 12, cuda(2)).hops) EXPECT_EQ(hop.link.kind, LinkKind::kNvlink);
}

TEST(PlacementHosts, RingsOnNodesWithPciOnly) {
  const std::vector<Machine> hosts(2, made_up({.packages = 2, .gpus = {4, 4}, .nics_per_package = 1}));
  const Placement placement = place(hosts, 16, cuda(16));
  EXPECT_EQ(crossings(placement), 2);
  std::map<LinkKind, int> kinds;
  for (const Hop& hop : placement.hops) kinds[hop.link.kind] += hop.other_host ? 0 : 1;
  EXPECT_EQ(kinds[LinkKind::kPciSwitch], 8) << "each pair on a switch";
  EXPECT_EQ(kinds[LinkKind::kSystem], 2) << "one hop between the packages of each host";
}

TEST(PlacementHosts, RingsOnUnlikeNodes) {
  const std::vector<Machine> hosts = {load("dgx.xml"), load("one_socket_gpus.xml"), load("h200_node.xml")};
  EXPECT_EQ(crossings(place(hosts, 20, cuda(20))), 3);
  EXPECT_EQ(crossings(place(hosts, 20, cuda(4))), 0);
  EXPECT_EQ(crossings(place(hosts, 20, cuda(10))), 4);
  EXPECT_EQ(crossings(place(hosts, 16, cuda(8))), 0) << "the host with four GPUs is not used";
  EXPECT_EQ(counts(place(hosts, 16, cuda(8)), 3), (std::vector<int>{8, 0, 8}));
  // Of the three rings of six, each host of eight has one, and the third uses GPUs left on two hosts.
  EXPECT_EQ(crossings(place(hosts, 18, cuda(6))), 2);
}

TEST(PlacementHosts, HostsThatMakeUpARingAreAdjacent) {
  const std::vector<Machine> hosts = {made_up({.gpus = {2}}), made_up({.gpus = {4}}), made_up({.gpus = {2}})};
  const Placement placement = place(hosts, 8, cuda(4));
  EXPECT_EQ(crossings(placement), 2);
  EXPECT_EQ(placement.ranks[0].host_index, 0);
  EXPECT_EQ(placement.ranks[2].host_index, 2);
  EXPECT_EQ(placement.ranks[4].host_index, 1);
  EXPECT_EQ(crossings(place(hosts, std::vector<int>{2, 4, 2}, cuda(4))), 4) << "a given order of hosts is kept";
  EXPECT_EQ(order_hosts({4, 8, 4}, 4), (std::vector<size_t>{0, 1, 2}));
  EXPECT_EQ(order_hosts({3, 2, 5, 2}, 4), (std::vector<size_t>{0, 2, 1, 3}));
}

TEST(PlacementHosts, RingsOnThirtyTwoNodesOfEight) {
  const std::vector<Machine> hosts(32, load("dgx.xml"));
  for (const auto& [context, expected] :
       std::vector<std::pair<int, int>>{{1, 0}, {2, 0}, {8, 0}, {16, 32}, {32, 32}, {64, 32}, {128, 32}, {256, 32}}) {
    EXPECT_EQ(crossings(place(hosts, 256, cuda(context))), expected) << "rings of " << context;
  }
  EXPECT_EQ(crossings(place(hosts, 192, cuda(6))), 0);
}

// The fewest hops between hosts over all possible sequences of the ranks' hosts.
int fewest_crossings(const std::vector<int>& room, int ranks, int context) {
  int best = ranks + 1;
  std::vector<int> left = room, hosts;
  const auto count = [&] {
    int now = 0;
    for (int r = 0; r < ranks && context > 1; ++r) {
      const int to = r / context * context + (r % context + 1) % context;
      now += hosts[static_cast<size_t>(r)] != hosts[static_cast<size_t>(to)] ? 1 : 0;
    }
    return now;
  };
  const auto go = [&](const auto& self) -> void {
    if (static_cast<int>(hosts.size()) == ranks) {
      best = std::min(best, count());
      return;
    }
    for (size_t h = 0; h < left.size(); ++h) {
      if (left[h] == 0) continue;
      --left[h];
      hosts.push_back(static_cast<int>(h));
      self(self);
      hosts.pop_back();
      ++left[h];
    }
  };
  go(go);
  return best;
}

TEST(PlacementHosts, CrossesAsRarelyAsTheBestAssignment) {
  std::vector<Machine> of_size;
  for (int gpus = 0; gpus <= 4; ++gpus) of_size.push_back(made_up({.gpus = {gpus}}));
  for (int a = 1; a <= 4; ++a) {
    for (int b = 1; b <= 4; ++b) {
      for (int c = 0; c <= 4; ++c) {
        std::vector<int> room = {a, b};
        if (c > 0) room.push_back(c);
        std::vector<Machine> hosts;
        for (int gpus : room) hosts.push_back(of_size[static_cast<size_t>(gpus)]);
        for (int ranks = 1; ranks <= std::min(8, a + b + c); ++ranks) {
          for (int context = 1; context <= ranks; ++context) {
            if (ranks % context != 0) continue;
            EXPECT_EQ(crossings(place(hosts, ranks, cuda(context))), fewest_crossings(room, ranks, context))
                << ranks << " ranks, rings of " << context << ", hosts of " << a << ", " << b << ", " << c;
          }
        }
      }
    }
  }
}

TEST(PlacementHosts, AssignsWholeRingsFirst) {
  EXPECT_EQ(deal_ranks({8, 8}, 12, 4), (std::vector<int>{8, 4}));
  EXPECT_EQ(deal_ranks({8, 8}, 12, 0), (std::vector<int>{6, 6}));
  EXPECT_EQ(deal_ranks({6, 6, 4}, 16, 4), (std::vector<int>{6, 6, 4}));
  EXPECT_EQ(deal_ranks({0, 8, 3}, 8, 8), (std::vector<int>{0, 8, 0}));
  for (int ranks : {0, -1, 17}) EXPECT_THROW(deal_ranks({8, 8}, ranks, 4), Error);
  // CPUs are shared evenly: a host with more ranks than the others would be slower.
  const std::vector<Machine> cpus(2, Machine::from_synthetic("[numa] core:8 pu:1"));
  EXPECT_EQ(counts(place(cpus, 12, {.context = 4}), 2), (std::vector<int>{6, 6}));
}

TEST(PlacementHosts, HostsGetAtMostTheirSlots) {
  const std::vector<Machine> hosts(2, load("dgx.xml"));
  const auto dealt = [&](int ranks, PlacementOptions options, const std::vector<int>& slots) {
    options.slots = slots;
    return counts(place(hosts, ranks, options), 2);
  };
  EXPECT_EQ(dealt(8, cuda(0), {2, 0}), (std::vector<int>{2, 6}));
  EXPECT_EQ(dealt(8, cuda(4), {5, 5}), (std::vector<int>{4, 4}));
  EXPECT_EQ(dealt(8, {}, {0, 2}), (std::vector<int>{6, 2}));
  EXPECT_EQ(dealt(20, {}, {16, 16}), (std::vector<int>{10, 10}));
  const auto refusal = [&](int ranks, const PlacementOptions& options, const std::vector<int>& slots) {
    try {
      dealt(ranks, options, slots);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("nothing was refused");
  };
  EXPECT_EQ(refusal(8, {}, {3, 3}),
            "[topology] 8 ranks do not fit into the 6 slots of the hosts; use -n 6 or less, or hosts with more slots");
  EXPECT_NE(refusal(10, cuda(0), {16, 1}).find("the 9 slots of the hosts that have a GPU"), std::string::npos);
  EXPECT_NE(refusal(17, cuda(0), {16, 16}).find("-n 16 or less"), std::string::npos);
}

// A ring continues to the next host from a GPU near a NIC.
TEST(PlacementHosts, RingLeavesAHostNextToItsNic) {
  Machine machine = made_up({.packages = 2, .gpus = {3, 3}, .nics_per_package = 1});
  for (size_t i = 0; i < machine.gpus.size(); ++i) {
    for (size_t j = 0; j < machine.gpus.size(); ++j) {
      if (i != j) machine.links[i][j] = {LinkKind::kNvlink, 450000};
    }
  }
  const auto ends = [&] {
    const Placement placement = place({machine, machine}, 12, cuda(12));
    return std::pair(placement.ranks[0].gpu, placement.ranks[5].gpu);
  };
  ASSERT_EQ(machine.nics.size(), 2U);
  EXPECT_EQ(ends(), std::pair(0, 5)) << "each package has a NIC, so that any GPU will do";
  machine.nics[0].active = false;
  EXPECT_EQ(ends(), std::pair(3, 5));
  machine.nics[0].active = true;
  machine.nics[1].rdma = false;
  EXPECT_EQ(ends(), std::pair(0, 2));
  // A ring within one host does not depend on the NIC.
  EXPECT_EQ(place({machine}, 6, cuda(6)).ranks[5].gpu, 5);
  // The speed of links comes first: a slow link is not used to end at the NIC.
  for (size_t i = 3; i < 6; ++i) machine.links[2][i] = machine.links[i][2] = {LinkKind::kSystem, 1000};
  for (size_t i : {1U, 0U}) {
    machine.links[2][i] = machine.links[i][2] = {LinkKind::kNvlink, i == 1 ? 450000 : 1000};
  }
  const Placement placement = place({machine, machine}, 12, cuda(12));
  EXPECT_TRUE(placement.ranks[0].gpu == 2 || placement.ranks[5].gpu == 2) << "GPU 2 has one fast link, so it is an end";
}

TEST(PlacementHosts, RingOrderMatchesBruteForceWithNicNearness) {
  std::mt19937 random(11);
  for (int n = 2; n <= 6; ++n) {
    for (int trial = 0; trial < 60; ++trial) {
      const auto size = static_cast<size_t>(n);
      GpuGraph graph{std::vector<std::vector<int64_t>>(size, std::vector<int64_t>(size, 0))};
      for (size_t i = 0; i < size; ++i) {
        for (size_t j = 0; j < i; ++j) {
          graph.bandwidth[i][j] = graph.bandwidth[j][i] = static_cast<int64_t>(random() % 3);
        }
        graph.nearness.push_back(static_cast<int>(random() % 6));
      }
      for (const RingPieces& pieces : {RingPieces{{n, false}}, RingPieces{{n / 2, true}, {n - n / 2, false}},
                                       RingPieces{{1, false}, {n - 1, false}}}) {
        std::vector<int> order(size);
        std::iota(order.begin(), order.end(), 0);
        const std::vector<int> found = best_ring_order(graph, order, pieces);
        RingWorth best;
        do {
          best = std::max(best, ring_worth(graph, order, pieces));
        } while (std::next_permutation(order.begin(), order.end()));
        EXPECT_EQ(ring_worth(graph, found, pieces), best) << n << " " << trial;
      }
    }
  }
}

// The context axis is the innermost: if rings are no longer than a host has GPUs, keys and values never leave a host,
// and gradients do once per step. With the data axis innermost, each of these rings would cross between hosts.
TEST(PlacementHosts, ContextAxisStaysWithinHosts) {
  const std::vector<Machine> hosts(2, load("dgx.xml"));
  const Placement placement = place(hosts, 16, cuda(8));
  EXPECT_EQ(crossings(placement), 0);
  const auto host_of = [&](int rank) { return placement.ranks[static_cast<size_t>(rank)].host_index; };
  int other = 0;
  const int data = 2, context = 8;
  for (int d = 0; d < data; ++d) {
    for (int c = 0; c < context; ++c) {
      other += host_of(d + data * c) != host_of(d + data * ((c + 1) % context)) ? 1 : 0;
    }
  }
  EXPECT_EQ(other, 4);
}

}  // namespace
}  // namespace annulus::placement_hosts_test
