// Tests which links the transfers of real programs cross if ranks are placed on described machines, joined by a real
// mesh and numbered by any launcher; and the lines of output that describe the rings.
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "attention/plan/plan.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/threads/threads.h"
#include "launcher/rank_locations.h"
#include "launcher/topology/machine.h"
#include "launcher/topology/placement.h"
#include "runtime/training/mesh.h"

namespace annulus::ring_test {
namespace {

using Pair = std::pair<int, int>;  // the lower first

Machine load(const std::string& name) { return Machine::from_xml("tests/launcher/topology/testdata/" + name); }

// Returns the pairs of ranks that exchange rows in the programs of causal attention over the context axis of a mesh
// [data, ranks / data]. `number` is indexed by the launcher's number of a rank and gives its number in the job; the
// pairs are of numbers in the job.
std::set<Pair> exchanging(int ranks, int data, const std::vector<int>& number, ScheduleKind schedule) {
  std::set<Pair> pairs;
  std::mutex mutex;
  run_ranks(ranks, [&](Communicator& launched) {
    const std::unique_ptr<Communicator> world = launched.split(0, number[static_cast<size_t>(launched.rank())]);
    Mesh mesh(*world, {{"data", data}, {"context", 0}});
    Communicator& axis = mesh.axis("context");
    at::Tensor members = at::full({axis.size()}, 0, at::kLong);
    axis.all_gather(members, at::full({}, world->rank(), at::kLong), {"test", 0});
    PlanRequest request;
    request.shape = {.heads = 2, .kv_heads = 2, .q_len = 64, .k_len = 64};
    request.pattern = causal_pattern();
    request.layout = LayoutKind::kZigzag;
    request.schedule = schedule;
    request.ranks = axis.size();
    const Program program = make_program(request, axis.rank());
    const std::lock_guard<std::mutex> lock(mutex);
    for (const std::vector<Step>* steps : {&program.forward, &program.backward}) {
      for (const Step& step : *steps) {
        for (const Transfer& send : step.sends) {
          const int peer = static_cast<int>(members[send.peer].item<int64_t>());
          pairs.insert(std::minmax(world->rank(), peer));
        }
      }
    }
  });
  return pairs;
}

std::vector<int> as_launched(int ranks) {
  std::vector<int> number(static_cast<size_t>(ranks));
  std::iota(number.begin(), number.end(), 0);
  return number;
}

struct Crossed {
  int nvlink = 0, pci = 0, network = 0;
  bool operator==(const Crossed&) const = default;
};

// `host` and `gpu` are indexed by rank.
Crossed crossed(const std::set<Pair>& pairs, const std::vector<Machine>& hosts, const std::vector<int>& host,
                const std::vector<int>& gpu) {
  Crossed count;
  for (const auto& [a, b] : pairs) {
    const auto i = static_cast<size_t>(a), j = static_cast<size_t>(b);
    if (host[i] != host[j]) {
      ++count.network;
    } else {
      const Link& link =
          hosts[static_cast<size_t>(host[i])].links[static_cast<size_t>(gpu[i])][static_cast<size_t>(gpu[j])];
      ++(link.kind == LinkKind::kNvlink ? count.nvlink : count.pci);
    }
  }
  return count;
}

struct RankPlaces {
  std::vector<int> host, gpu;
};

RankPlaces placed(const std::vector<Machine>& hosts, int ranks, int context) {
  RankPlaces places;
  for (const RankPlacement& rank : place(hosts, ranks, {.device = DeviceKind::kCuda, .context = context}).ranks) {
    places.host.push_back(rank.host_index);
    places.gpu.push_back(rank.gpu);
  }
  return places;
}

// GPUs of one socket: NVLink connects 0 with 2 and 1 with 3; all other pairs are connected by PCI.
TEST(PlacedRing, FollowsNvlinkWithinASocket) {
  const std::vector<Machine> host = {load("one_socket_gpus.xml")};
  const std::set<Pair> pairs = exchanging(4, 1, as_launched(4), ScheduleKind::kRing);
  EXPECT_EQ(pairs, (std::set<Pair>{{0, 1}, {1, 2}, {2, 3}, {0, 3}}));
  const RankPlaces places = placed(host, 4, 4);
  const Crossed got = crossed(pairs, host, places.host, places.gpu);
  EXPECT_EQ(got, (Crossed{.nvlink = 2, .pci = 2}));
  // No order of the GPUs crosses fewer slow links; the order of the PCI bus ids crosses only slow ones.
  std::vector<int> gpu = {0, 1, 2, 3};
  EXPECT_EQ(crossed(pairs, host, places.host, gpu), (Crossed{.pci = 4}));
  do {
    EXPECT_GE(crossed(pairs, host, places.host, gpu).pci, got.pci);
  } while (std::next_permutation(gpu.begin(), gpu.end()));
}

TEST(PlacedRing, EachDataGroupHasAFastRing) {
  const std::vector<Machine> host = {load("one_socket_gpus.xml")};
  const std::set<Pair> pairs = exchanging(4, 2, as_launched(4), ScheduleKind::kRing);
  const RankPlaces places = placed(host, 4, 2);
  EXPECT_EQ(crossed(pairs, host, places.host, places.gpu), (Crossed{.nvlink = 2}));
  EXPECT_EQ(crossed(pairs, host, places.host, {0, 1, 2, 3}), (Crossed{.pci = 2}));
  // If they were cut out of the ring of all four GPUs, the groups would not be the fast pairs.
  EXPECT_EQ(crossed(pairs, host, places.host, placed(host, 4, 4).gpu), (Crossed{.pci = 2}));
}

// Eight GPUs of two sockets: NVLink connects the even GPUs with each other, and the odd ones with each other.
TEST(PlacedRing, StaysWithinNvlinkCliques) {
  Machine machine = load("dgx.xml");
  for (size_t i = 0; i < 8; ++i) {
    for (size_t j = 0; j < 8; ++j) {
      if (i != j && i % 2 == j % 2) machine.links[i][j] = {LinkKind::kNvlink, 300000};
      if (i % 2 != j % 2) machine.links[i][j] = {LinkKind::kSystem, 8000};
    }
  }
  const std::vector<Machine> host = {machine};
  std::vector<int> pci(8);
  std::iota(pci.begin(), pci.end(), 0);
  const std::set<Pair> one = exchanging(8, 1, as_launched(8), ScheduleKind::kRing);
  const RankPlaces whole = placed(host, 8, 8);
  EXPECT_EQ(crossed(one, host, whole.host, whole.gpu), (Crossed{.nvlink = 6, .pci = 2}));
  EXPECT_EQ(crossed(one, host, whole.host, pci), (Crossed{.pci = 8}));
  const RankPlaces halves = placed(host, 8, 4);
  // With every schedule, a context group sends only within its clique.
  for (const ScheduleKind schedule : {ScheduleKind::kRing, ScheduleKind::kAllGather, ScheduleKind::kGroupCast}) {
    const std::set<Pair> two = exchanging(8, 2, as_launched(8), schedule);
    const Crossed got = crossed(two, host, halves.host, halves.gpu);
    EXPECT_EQ(got, (Crossed{.nvlink = static_cast<int>(two.size())})) << to_string(schedule);
    EXPECT_GT(crossed(two, host, halves.host, pci).pci, 0) << to_string(schedule);
  }
}

TEST(PlacedRing, CrossesTheNetworkTwiceForCyclicRankNumbers) {
  const Machine m = load("one_socket_gpus.xml");
  const std::vector<Machine> hosts = {m, m};
  const RankPlaces places = placed(hosts, 8, 8);
  EXPECT_EQ(places.host, (std::vector<int>{0, 0, 0, 0, 1, 1, 1, 1}));
  // Rank r of the launcher is on host r % 2, so ranks r - 1 and r + 1 are on the other host.
  const std::vector<std::string> cyclic = {"a", "b", "a", "b", "a", "b", "a", "b"};
  const std::vector<int> order = rank_order_by_host(cyclic);
  EXPECT_EQ(order, (std::vector<int>{0, 2, 4, 6, 1, 3, 5, 7}));
  std::vector<int> number(8);
  for (size_t place = 0; place < 8; ++place) number[static_cast<size_t>(order[place])] = static_cast<int>(place);

  const std::set<Pair> pairs = exchanging(8, 1, number, ScheduleKind::kRing);
  EXPECT_EQ(crossed(pairs, hosts, places.host, places.gpu), (Crossed{.nvlink = 4, .pci = 2, .network = 2}));
  EXPECT_EQ(crossed(pairs, hosts, places.host, {0, 1, 2, 3, 0, 1, 2, 3}), (Crossed{.pci = 6, .network = 2}));
  EXPECT_EQ(crossed(pairs, hosts, {0, 1, 0, 1, 0, 1, 0, 1}, places.gpu).network, 8);

  // With one group on each host, nothing crosses the network.
  const RankPlaces groups = placed(hosts, 8, 4);
  const std::set<Pair> two = exchanging(8, 2, number, ScheduleKind::kRing);
  EXPECT_EQ(crossed(two, hosts, groups.host, groups.gpu), (Crossed{.nvlink = 4, .pci = 4}));
}

TEST(RankOrderByHost, FollowsTheLowestRankOfEachHost) {
  EXPECT_EQ(rank_order_by_host({}), std::vector<int>{});
  EXPECT_EQ(rank_order_by_host({"a", "a", "b", "b"}), (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(rank_order_by_host({"b", "a", "a", "b", "c"}), (std::vector<int>{0, 3, 1, 2, 4}));
}

TEST(RingLines, ListRingsHostsDevicesAndNics) {
  std::vector<RankLocation> locations = {{"a", "0000:17:00.0", "mlx5_0", "mlx5_0:1", 0},
                                         {"a", "0000:65:00.0", "mlx5_1", "mlx5_0:1", 2},
                                         {"b", "0000:17:00.0", "mlx5_0", "", 1},
                                         {"b", "0000:65:00.0", "mlx5_0", "", 3}};
  EXPECT_EQ(ring_lines(locations, 4),
            (std::vector<std::string>{
                "ring: ranks 0-3, each to the next and the last to the first",
                "  host a: ranks 0-1 on 0000:17:00.0 0000:65:00.0, nearest NIC mlx5_0 mlx5_1, NCCL took mlx5_0:1",
                "  host b: ranks 2-3 on 0000:17:00.0 0000:65:00.0, nearest NIC mlx5_0",
                "  ranks are numbered host by host; the launcher numbers them 0 2 1 3",
            }));
  EXPECT_EQ(ring_lines(locations, 2).front(), "rings: ranks 0-1, 2-3, each to the next and the last to the first");
  EXPECT_EQ(ring_lines({{"a", "cpu", "", "", 0}}, 1),
            std::vector<std::string>{"  host a: rank 0 on cpu, nearest NIC none"});
  locations.clear();
  for (int r = 0; r < 1024; ++r) locations.push_back({"host" + std::to_string(r / 8), "cpu", "", "", r});
  const std::vector<std::string> many = ring_lines(locations, 8);
  EXPECT_EQ(many.size(), 18U);
  EXPECT_EQ(many.back(), "  and 112 more hosts");
  for (const std::string& line : many) EXPECT_LE(line.size(), 120U) << line;
}

}  // namespace
}  // namespace annulus::ring_test
