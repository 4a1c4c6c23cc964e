// Tests of placements (launcher/topology/placement.h) of small machines in comparison with every choice and order of
// the GPUs, and of machines on which ranks must use another node than their GPU's, which random machines rarely are.
// placement_property_test.cc tests the properties that hold for every machine.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "launcher/topology/placement.h"
#include "tests/launcher/topology/machine_xml.h"

namespace annulus::placement_oracle_test {
namespace {

// A machine whose GPUs have random links of three speeds, independent of the order of their PCI bus ids.
Machine linked_gpus(int gpus, unsigned seed) {
  Machine machine = Machine::from_synthetic("pack:1 [numa] core:8 pu:1");
  std::vector<std::string> ids;
  for (int g = 1; g <= gpus; ++g) ids.push_back(std::to_string(g) + ":00.0");
  machine.set_visible_gpus(ids);
  std::mt19937 random(seed);
  const std::array<int64_t, 3> speeds = {8000, 32000, 300000};
  for (size_t i = 0; i < machine.gpus.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      machine.links[i][j] = {LinkKind::kNvlink, speeds[random() % speeds.size()]};
      machine.links[j][i] = machine.links[i][j];
    }
  }
  return machine;
}

// The speeds, ascending, of the links that rings of `context` ranks use if rank r has GPU order[r]: each rank sends to
// the next of its ring, and the last to the first. If the ranks are not whole rings, they are a path from the first
// rank to the last.
std::vector<int64_t> speeds_used(const Machine& machine, const std::vector<int>& order, int context) {
  const auto count = static_cast<int>(order.size());
  std::vector<std::pair<int, int>> hops;
  if (count % context != 0) {
    for (int r = 0; r + 1 < count; ++r) hops.emplace_back(r, r + 1);
  } else {
    for (int r = 0; r < count && context > 1; ++r) {
      const int ring = r / context;
      hops.emplace_back(r, ring * context + (r + 1) % context);
    }
  }
  std::vector<int64_t> speeds;
  for (const auto& [from, to] : hops) {
    const int a = order[static_cast<size_t>(from)], b = order[static_cast<size_t>(to)];
    speeds.push_back(machine.links[static_cast<size_t>(a)][static_cast<size_t>(b)].megabytes_per_s);
  }
  std::sort(speeds.begin(), speeds.end());
  return speeds;
}

// The speed of the slowest link, which limits the rings, then the sum of all speeds.
std::pair<int64_t, int64_t> worth(const std::vector<int64_t>& speeds) {
  if (speeds.empty()) return {0, 0};
  return {speeds.front(), std::accumulate(speeds.begin(), speeds.end(), int64_t{0})};
}

struct Best {
  std::vector<int> order;  // the first of the orders with the greatest worth
  std::pair<int64_t, int64_t> worth;
};

Best best_of_all(const Machine& machine, int count, int context) {
  std::vector<int> gpus(machine.gpus.size());
  std::iota(gpus.begin(), gpus.end(), 0);
  std::optional<Best> best;
  do {
    const std::vector<int> order(gpus.begin(), gpus.begin() + count);
    const auto now = worth(speeds_used(machine, order, context));
    if (!best || now > best->worth) best = Best{order, now};
    std::reverse(gpus.begin() + count, gpus.end());  // skips to the next choice of the first `count`
  } while (std::next_permutation(gpus.begin(), gpus.end()));
  return *best;
}

TEST(PlacementOracle, NoOtherGpuOrderMakesFasterRings) {
  for (int gpus = 2; gpus <= 6; ++gpus) {
    for (unsigned seed = 0; seed < 12; ++seed) {
      const Machine machine = linked_gpus(gpus, seed);
      for (int count = 1; count <= gpus; ++count) {
        for (int context = 1; context <= gpus + 1; ++context) {
          // The host is part of a job that has whole rings in total.
          const PlacementOptions options{.device = DeviceKind::kCuda, .context = context, .job_ranks = count * context};
          const Placement placement = place({machine}, std::vector<int>{count}, options);
          std::vector<int> order;
          for (const RankPlacement& rank : placement.ranks) order.push_back(rank.gpu);
          const Best best = best_of_all(machine, count, context);
          EXPECT_EQ(worth(speeds_used(machine, order, context)), best.worth)
              << count << " of " << gpus << " GPUs, rings of " << context << ", machine " << seed;
          // Of equal orders, the one nearest to that of the PCI bus ids is chosen.
          if (count == gpus) {
            EXPECT_EQ(order, best.order) << gpus << " GPUs, rings of " << context << ", machine " << seed;
          }
        }
      }
    }
  }
}

// Two packages of two nodes each; node n has `cores[n]` cores, and GPU g is near the nodes `near[g]`.
Machine tight(const std::vector<int>& cores, const std::vector<std::vector<int>>& near) {
  Machine machine = Machine::from_xml_text(
      testing::to_xml({.packages = 2, .nodes_per_package = 2, .gpus = {static_cast<int>(near.size()), 0}}), "tight");
  std::vector<int> left = cores;
  std::erase_if(machine.cores, [&](const Core& core) { return left[static_cast<size_t>(core.numa)]-- <= 0; });
  for (size_t g = 0; g < near.size(); ++g) machine.gpus[g].numa = near[g];
  return machine;
}

std::vector<int> nodes_by_gpu(const Machine& machine) {
  std::vector<int> nodes(machine.gpus.size());
  const auto count = static_cast<int>(nodes.size());
  for (const RankPlacement& rank : place({machine}, count, {.device = DeviceKind::kCuda}).ranks) {
    nodes[static_cast<size_t>(rank.gpu)] = rank.numa_node;
  }
  return nodes;
}

// The number of free cores in the other package does not matter.
TEST(PlacementOracle, RankWithoutANearCoreStaysInThePackage) {
  EXPECT_EQ(nodes_by_gpu(tight({1, 1, 4, 4}, {{0}, {0}})), (std::vector<int>{0, 1}));
  EXPECT_EQ(nodes_by_gpu(tight({4, 4, 1, 1}, {{3}, {3}})), (std::vector<int>{3, 2}));
  EXPECT_EQ(nodes_by_gpu(tight({1, 2, 4, 3}, {{0}, {0}, {0}, {0}})), (std::vector<int>{0, 1, 1, 2}));
}

// An earlier rank in the ring does not take the only near core of a later one.
TEST(PlacementOracle, RankWithAChoiceOfNodesYieldsToOneWithout) {
  EXPECT_EQ(nodes_by_gpu(tight({1, 1, 1, 1}, {{0, 1}, {0}})), (std::vector<int>{1, 0}));
  EXPECT_EQ(nodes_by_gpu(tight({1, 1, 1, 1}, {{0, 1, 2, 3}, {0, 1}, {0}, {2}})), (std::vector<int>{3, 1, 0, 2}));
}

}  // namespace
}  // namespace annulus::placement_oracle_test
