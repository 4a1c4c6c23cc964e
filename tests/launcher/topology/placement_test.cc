// Tests of placements of known machines (launcher/topology/placement.h), of ring orders in comparison with brute force
// (launcher/topology/ring_order.h), and of what is printed (launcher/topology/report.h).
#include "launcher/topology/placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <sstream>
#include <string>

#include "common/error.h"
#include "launcher/topology/report.h"
#include "launcher/topology/ring_order.h"
#include "tests/launcher/topology/machine_xml.h"

namespace annulus::placement_test {
namespace {

constexpr PlacementOptions kCuda{DeviceKind::kCuda};

Machine load(const std::string& name) { return Machine::from_xml("tests/launcher/topology/testdata/" + name); }

template <typename T, typename Get>
std::vector<T> column(const Placement& placement, Get get) {
  std::vector<T> out;
  for (const RankPlacement& rank : placement.ranks) out.push_back(get(rank));
  return out;
}

std::vector<std::string> cpus(const Placement& placement) {
  return column<std::string>(placement, [](const RankPlacement& r) { return r.cpus.to_string(); });
}

std::vector<std::string> nics(const Placement& placement) {
  return column<std::string>(placement, [](const RankPlacement& r) { return r.nic_name; });
}

std::vector<int> gpus(const Placement& placement) {
  return column<int>(placement, [](const RankPlacement& r) { return r.gpu; });
}

std::vector<int> nodes(const Placement& placement) {
  return column<int>(placement, [](const RankPlacement& r) { return r.numa_node; });
}

std::string plan_error(const std::vector<Machine>& hosts, int ranks, const PlacementOptions& options,
                       ErrorKind kind = ErrorKind::kPlan) {
  try {
    place(hosts, ranks, options);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

TEST(Placement, PlacesEightGpus) {
  const Placement p = place({load("h200_node.xml")}, 8, kCuda);
  EXPECT_EQ(cpus(p), (std::vector<std::string>{"0-1", "2-3", "4-5", "6-7", "8-9", "10-11", "12-13", "14-15"}));
  EXPECT_EQ(nics(p),
            (std::vector<std::string>{"mlx5_0", "mlx5_0", "mlx5_1", "mlx5_1", "mlx5_2", "mlx5_2", "mlx5_3", "mlx5_3"}));
  EXPECT_EQ(nodes(p), (std::vector<int>{0, 0, 0, 0, 1, 1, 1, 1}));
  EXPECT_EQ(gpus(p), (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_FALSE(p.oversubscribed);
  EXPECT_EQ(p.ranks[4].gpu_pci, "0000:91:00.0");
  EXPECT_EQ(p.ranks[4].threads, 2);
  EXPECT_EQ(p.ranks[4].memory_nodes, std::vector<int>{1});
  EXPECT_FALSE(p.ranks[4].is_this_system);
}

TEST(Placement, GpusOnOneSocketShareItsCores) {
  const Machine m = load("one_socket_gpus.xml");
  const Placement p = place({m}, 4, kCuda);
  EXPECT_EQ(cpus(p), (std::vector<std::string>{"0-1,16-17", "2-3,18-19", "4-5,20-21", "6-7,22-23"}));
  EXPECT_EQ(nodes(p), (std::vector<int>{0, 0, 0, 0}));
  EXPECT_EQ(gpus(p), (std::vector<int>{0, 1, 3, 2}));  // the ring uses both NVLink bridges, 0-2 and 1-3
  // Two ranks get two GPUs that a bridge joins.
  const Placement two = place({m}, 2, kCuda);
  EXPECT_EQ(gpus(two), (std::vector<int>{0, 2}));
  EXPECT_EQ(cpus(two), (std::vector<std::string>{"0-3,16-19", "4-7,20-23"}));
}

TEST(Placement, ExcessRanksOfASocketUseTheOther) {
  testing::MadeUpMachine machine;
  machine.packages = 2;
  machine.cores_per_node = 3;
  machine.gpus = {4};
  const Placement p = place({Machine::from_xml_text(testing::to_xml(machine), "x")}, 4, kCuda);
  EXPECT_EQ(nodes(p), (std::vector<int>{0, 0, 0, 1}));
  EXPECT_EQ(cpus(p), (std::vector<std::string>{"0", "1", "2", "3-5"}));
  EXPECT_FALSE(p.oversubscribed);
}

TEST(Placement, ChoosesTheNearestNicThatIsUp) {
  const Placement p = place({load("dgx.xml")}, 8, kCuda);
  EXPECT_EQ(nics(p),
            (std::vector<std::string>{"mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3", "mlx5_4", "mlx5_6", "mlx5_6", "mlx5_7"}));
  EXPECT_EQ(p.ranks[0].threads, 14);
  // Two of the eight links of the ring are between the sockets, the fewest possible.
  EXPECT_EQ(std::count_if(p.hops.begin(), p.hops.end(), [](const Hop& h) { return h.link.kind == LinkKind::kSystem; }),
            2);
}

TEST(Placement, UsesOnlyTheHcasOfTheJob) {
  Machine m = load("dgx.xml");
  const Placement all = place({m}, 8, kCuda);
  EXPECT_EQ(all.ranks[0].hca, "mlx5_0:1");  // the port that is up
  m.keep_hcas({"mlx5_1", "mlx5_7:2"});
  const Placement p = place({m}, 8, kCuda);
  EXPECT_EQ(nics(p),
            (std::vector<std::string>{"mlx5_1", "mlx5_1", "mlx5_1", "mlx5_1", "mlx5_7", "mlx5_7", "mlx5_7", "mlx5_7"}));
  EXPECT_EQ(p.ranks[0].hca, "mlx5_1:1");
  EXPECT_EQ(p.ranks[7].hca, "mlx5_7:2");
}

TEST(Placement, CpuRanksSpreadOverNodes) {
  const Machine m = Machine::from_synthetic("pack:2 [numa] l3:1 core:4 pu:2");
  const Placement one = place({m}, 1);
  EXPECT_EQ(cpus(one), (std::vector<std::string>{"0-15"}));
  EXPECT_EQ(one.ranks[0].threads, 8);
  EXPECT_EQ(one.ranks[0].memory_nodes, (std::vector<int>{0, 1}));
  EXPECT_TRUE(one.hops.empty());
  EXPECT_EQ(cpus(place({m}, 2)), (std::vector<std::string>{"0-7", "8-15"}));
  EXPECT_EQ(cpus(place({m}, 3)), (std::vector<std::string>{"0-5", "6-9", "10-15"}));
  const Placement eight = place({m}, 8);
  EXPECT_EQ(cpus(eight)[5], "10-11");  // a whole core, both its threads
  EXPECT_EQ(eight.ranks[5].threads, 1);
  EXPECT_FALSE(eight.oversubscribed);
}

TEST(Placement, DividesCoresEvenlyAcrossNodes) {
  const Machine m = Machine::from_synthetic("pack:2 [numa] core:6 pu:1");
  const Placement three = place({m}, 3);
  EXPECT_EQ(cpus(three), (std::vector<std::string>{"0-3", "4-7", "8-11"}));
  EXPECT_EQ(nodes(three), (std::vector<int>{0, 0, 1}));
  EXPECT_EQ(three.ranks[0].memory_nodes, std::vector<int>{0});
  EXPECT_EQ(three.ranks[1].memory_nodes, (std::vector<int>{0, 1}));
  EXPECT_EQ(cpus(place({m}, 5)), (std::vector<std::string>{"0-1", "2-4", "5-6", "7-9", "10-11"}));
  // With fewer ranks than nodes as well.
  const Machine quarters = Machine::from_synthetic("numa:4 core:4 pu:1");
  EXPECT_EQ(cpus(place({quarters}, 3)), (std::vector<std::string>{"0-4", "5-10", "11-15"}));
  EXPECT_EQ(cpus(place({quarters}, 2)), (std::vector<std::string>{"0-7", "8-15"}));
}

// A core more is worth less to a rank than memory of one node.
TEST(Placement, KeepsRanksOnTheirNodesIfThatIsNearlyEven) {
  Machine m = Machine::from_synthetic("pack:2 [numa] core:32 pu:1");
  m.cores.erase(m.cores.begin() + 31);  // one core is kept for other work
  EXPECT_EQ(cpus(place({m}, 2)), (std::vector<std::string>{"0-30", "32-63"}));
  m.cores.erase(m.cores.begin() + 26, m.cores.begin() + 31);  // 26 and 32: 29 each, of which an eighth are 3
  EXPECT_EQ(cpus(place({m}, 2)), (std::vector<std::string>{"0-25", "32-63"}));
  m.cores.erase(m.cores.begin() + 20, m.cores.begin() + 26);  // 20 and 32
  EXPECT_EQ(cpus(place({m}, 2)), (std::vector<std::string>{"0-19,32-37", "38-63"}));
}

TEST(Placement, ThreadsAreLimitedByTheQuota) {
  Machine m = Machine::from_synthetic("pack:2 [numa] core:4 pu:2");
  const auto threads = [&](double quota, int ranks) {
    m.cpu_quota = quota;
    const Placement p = place({m}, ranks);
    for (const RankPlacement& rank : p.ranks) EXPECT_EQ(rank.cores, 8 / ranks);
    return column<int>(p, [](const RankPlacement& r) { return r.threads; });
  };
  EXPECT_EQ(threads(0, 2), (std::vector<int>{4, 4}));
  EXPECT_EQ(threads(6, 2), (std::vector<int>{3, 3}));
  EXPECT_EQ(threads(2.5, 1), std::vector<int>{3});
  EXPECT_EQ(threads(2.4, 1), std::vector<int>{2});
  EXPECT_EQ(threads(1, 4), (std::vector<int>{1, 1, 1, 1}));
  EXPECT_EQ(threads(1e300, 2), (std::vector<int>{4, 4}));
}

// Two threads of one rank each would share a hardware thread while another is idle.
TEST(Placement, ExcessRanksGoWhereHardwareThreadsAreLeft) {
  Machine m = Machine::from_synthetic("pack:2 [numa] core:1 pu:2");
  m.cores[0].pus = {0};  // the first core has one thread, the second two
  m.numa_nodes[0].cpus = m.packages[0].cpus = CpuSet({0});
  EXPECT_EQ(cpus(place({m}, 3)), (std::vector<std::string>{"0", "2", "3"}));
  EXPECT_EQ(cpus(place({m}, 6)), (std::vector<std::string>{"0", "0", "2-3", "2-3", "2-3", "2-3"}));
  // On GPUs of the first package, too.
  m.set_visible_gpus({"1:00.0", "2:00.0", "3:00.0"});
  for (Gpu& gpu : m.gpus) gpu.numa = {0};
  EXPECT_EQ(cpus(place({m}, 3, kCuda)), (std::vector<std::string>{"0", "2", "3"}));
}

TEST(Placement, UnevenNodesGetRanksByTheirCores) {
  Machine m = Machine::from_synthetic("pack:2 [numa] core:6 pu:1");
  m.cores.erase(m.cores.begin() + 8, m.cores.end());  // like a cgroup that leaves two cores of the second node
  EXPECT_EQ(nodes(place({m}, 4)), (std::vector<int>{0, 0, 0, 1}));
  EXPECT_EQ(cpus(place({m}, 4)), (std::vector<std::string>{"0-1", "2-3", "4-5", "6-7"}));
}

TEST(Placement, SharesCoresAmongExcessRanks) {
  const Machine m = Machine::from_synthetic("pack:2 [numa] core:2 pu:2");
  const Placement threads = place({m}, 8);
  EXPECT_EQ(cpus(threads), (std::vector<std::string>{"0", "1", "2", "3", "4", "5", "6", "7"}));
  EXPECT_TRUE(threads.oversubscribed);
  const Placement shared = place({m}, 10);
  EXPECT_TRUE(shared.oversubscribed);
  EXPECT_EQ(cpus(shared),
            (std::vector<std::string>{"0-1", "0-1", "0-1", "2-3", "2-3", "4-5", "4-5", "4-5", "6-7", "6-7"}));
  for (const RankPlacement& rank : shared.ranks) EXPECT_EQ(rank.threads, 1);
}

TEST(Placement, PlacesRanksOnSeveralHosts) {
  Machine a = load("h200_node.xml");
  Machine b = load("one_socket_gpus.xml");
  const Placement p = place({a, b}, 10, kCuda);  // 6 and 4, since b has only four GPUs
  EXPECT_EQ(std::count_if(p.ranks.begin(), p.ranks.end(), [](const RankPlacement& r) { return r.host_index == 0; }), 6);
  EXPECT_EQ(p.ranks[6].host, "one-socket-gpus");
  EXPECT_EQ(p.ranks[6].local_rank, 0);
  // A part of a ring has no closing link; that on b uses both bridges and one PCI link.
  EXPECT_EQ(gpus(p), (std::vector<int>{0, 1, 2, 3, 4, 5, 0, 2, 3, 1}));
  EXPECT_EQ(std::count_if(p.hops.begin(), p.hops.end(), [](const Hop& h) { return h.other_host; }), 2);
  const Placement counted = place({a, b}, std::vector<int>{0, 3}, kCuda);
  EXPECT_EQ(counted.ranks[0].host_index, 1);
  EXPECT_EQ(counted.ranks.size(), 3U);
}

TEST(Placement, EachRingUsesItsFastestLinks) {
  const Machine m = load("one_socket_gpus.xml");
  // Two rings of two use one NVLink bridge each. A ring of four, cut in the middle, would use neither.
  const Placement p = place({m}, 4, {.device = DeviceKind::kCuda, .context = 2});
  EXPECT_EQ(gpus(p), (std::vector<int>{0, 2, 1, 3}));
  ASSERT_EQ(p.hops.size(), 4U);
  EXPECT_EQ(p.hops[1].to, 0);
  EXPECT_EQ(p.hops[2].to, 3);
  for (const Hop& hop : p.hops) EXPECT_EQ(hop.link.kind, LinkKind::kNvlink);
  // Rings of one send nothing.
  EXPECT_TRUE(place({m}, 4, {.device = DeviceKind::kCuda, .context = 1}).hops.empty());
  // With two hosts and rings of four, each host's GPUs are one closed ring.
  const Placement two = place({m, m}, 8, {.device = DeviceKind::kCuda, .context = 4});
  EXPECT_EQ(gpus(two), (std::vector<int>{0, 1, 3, 2, 0, 1, 3, 2}));
  EXPECT_TRUE(std::none_of(two.hops.begin(), two.hops.end(), [](const Hop& h) { return h.other_host; }));
  // A ring of all eight goes through both hosts and crosses between them once in each direction.
  const Placement all = place({m, m}, 8, kCuda);
  EXPECT_EQ(gpus(all), (std::vector<int>{0, 2, 3, 1, 0, 2, 3, 1}));
  EXPECT_EQ(std::count_if(all.hops.begin(), all.hops.end(), [](const Hop& h) { return h.other_host; }), 2);
}

TEST(Placement, RankCanPlaceItsOwnHostAlone) {
  const Machine m = load("one_socket_gpus.xml");
  const PlacementOptions options{.device = DeviceKind::kCuda, .context = 8, .job_ranks = 16};
  const Placement p = place({m}, std::vector<int>{4}, options);
  EXPECT_EQ(gpus(p), (std::vector<int>{0, 2, 3, 1}));  // a path, not a ring
  EXPECT_TRUE(p.hops.empty());
}

TEST(Placement, RefusesImpossibleRequests) {
  const Machine m = load("h200_node.xml");
  const Machine cpu = Machine::from_synthetic("[numa] core:2 pu:1");
  EXPECT_EQ(
      plan_error({m}, 9, kCuda, ErrorKind::kUnavailable),
      "[topology] host h200-node has 8 GPUs, but 9 ranks with device = \"cuda\" were asked of it, and each needs a "
      "GPU of its own; use at most 8 ranks there, more hosts, or device = \"cpu\"");
  EXPECT_NE(plan_error({m, m}, 17, kCuda, ErrorKind::kUnavailable).find("-n 16"), std::string::npos);
  EXPECT_NE(plan_error({cpu}, 1, kCuda, ErrorKind::kUnavailable).find("no GPU"), std::string::npos);
  EXPECT_NE(plan_error({cpu, cpu}, 1, kCuda, ErrorKind::kUnavailable).find("device = \"cpu\""), std::string::npos);
  plan_error({m}, 0, {});
  plan_error({m}, -1, {});
  plan_error({m, m}, 0, {});
  plan_error({m}, 2000000000, {});
  plan_error({m, m}, 2000000000, kCuda);
  plan_error({}, 1, {});
  EXPECT_NE(
      plan_error({m}, 6, {.device = DeviceKind::kCuda, .context = 4}).find("6 ranks cannot be divided into rings of 4"),
      std::string::npos);
  EXPECT_THROW(place({m}, std::vector<int>{-1}), Error);
  EXPECT_THROW(place({m}, std::vector<int>{1, 1}), Error);
  EXPECT_THROW(place({m, m}, std::vector<int>{0, 0}), Error);
}

TEST(RingOrder, MatchesBruteForce) {
  std::mt19937 random(7);
  for (int n = 3; n <= 6; ++n) {
    for (int trial = 0; trial < 60; ++trial) {
      std::vector<std::vector<int64_t>> w(static_cast<size_t>(n), std::vector<int64_t>(static_cast<size_t>(n), 0));
      for (size_t i = 0; i < w.size(); ++i) {
        for (size_t j = 0; j < i; ++j) w[i][j] = w[j][i] = static_cast<int64_t>(random() % 5);
      }
      // The pieces are a path, a ring, and a ring followed by a path.
      for (const RingPieces& pieces :
           {RingPieces{{n, false}}, RingPieces{{n, true}}, RingPieces{{n / 2, true}, {n - n / 2, false}}}) {
        std::vector<int> order(static_cast<size_t>(n));
        std::iota(order.begin(), order.end(), 0);
        const std::vector<int> members = order;
        RingWorth best;
        std::vector<int> first;
        do {
          const RingWorth worth = ring_worth({w}, order, pieces);
          if (first.empty() || worth > best) {
            best = worth;
            first = order;
          }
        } while (std::next_permutation(order.begin(), order.end()));
        const std::vector<int> found = best_ring_order({w}, members, pieces);
        EXPECT_EQ(ring_worth({w}, found, pieces), best);
        EXPECT_EQ(found, first);  // of equal orders, the one nearest to 0, 1, 2, ...
      }
    }
  }
}

TEST(RingOrder, FindsTheFastRingOfManyGpus) {
  // Sixteen GPUs have fast links in a shuffled ring and slow links otherwise; the fast ring must be found.
  std::vector<int> hidden(16);
  std::iota(hidden.begin(), hidden.end(), 0);
  std::shuffle(hidden.begin() + 1, hidden.end(), std::mt19937(3));
  std::vector<std::vector<int64_t>> w(16, std::vector<int64_t>(16, 1));
  for (size_t i = 0; i < 16; ++i) {
    const auto a = static_cast<size_t>(hidden[i]);
    const auto b = static_cast<size_t>(hidden[(i + 1) % 16]);
    w[a][b] = w[b][a] = 100;
  }
  std::vector<int> members(16);
  std::iota(members.begin(), members.end(), 0);
  const std::vector<int> order = best_ring_order({w}, members, {{16, true}});
  EXPECT_EQ(order[0], 0);
  EXPECT_EQ(ring_worth({w}, order, {{16, true}}).slowest, 100);
  const RingPieces path = {{8, false}};
  EXPECT_EQ(ring_worth({w}, best_ring_order({w}, best_members({w}, path), path), path).slowest, 100);
}

TEST(Report, TableOfEightGpusFitsATerminal) {
  const Machine m = load("h200_node.xml");
  for (const char* name : {"h200_node.xml", "dgx.xml"}) {
    const Machine machine = load(name);
    std::istringstream lines(topology_table({machine}, place({machine}, 8, kCuda)));
    for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 120U) << line;
  }
  const std::string table = to_table({m}, place({m}, 8, kCuda));
  EXPECT_NE(
      table.find("     5  h200-node      5  GPU5    0000:92:00.0     1  10-11        2  node 1  mlx5_2  6 over NVLink "
                 "450 GB/s\n"),
      std::string::npos)
      << table;
  EXPECT_NE(table.find("  ring  0 -> 1 -> 2 -> 3 -> 4 -> 5 -> 6 -> 7 -> 0\n"), std::string::npos) << table;
  EXPECT_NE(to_table(m).find("host h200-node: 2 packages, 2 NUMA nodes, 16 cores (16 threads), 2.0 TiB memory, 8 GPUs, "
                             "4 NICs"),
            std::string::npos);
}

TEST(Report, ShowsPortsAndSwitches) {
  Machine m = load("h200_node.xml");
  m.nvswitches = 4;
  m.nics[0].set_ports({{1, false, false, 400000}, {2, true, false, 400000}});
  m.nics[1].set_ports({{1, true, true, 2500}});
  m.nics[2].set_ports({{1, false, false, 0}});
  const std::string table = to_table(m);
  for (const char* words : {"RDMA, InfiniBand 400 Gb/s\n", "RDMA, RoCE 2.5 Gb/s\n", "RDMA, no port up\n", "RDMA\n",
                            "NVLink in GB/s through 4 NVSwitches\n"}) {
    EXPECT_NE(table.find(words), std::string::npos) << words << table;
  }
}

TEST(Report, ShowsInterfaces) {
  EXPECT_EQ(
      to_table(std::vector<NetInterface>{{"eth0", true, false, 2500, {"10.0.0.1/24", "fe80::1/64"}, "0000:01:00.0"},
                                         {"lo", true, true, 0, {"127.0.0.1/8"}, ""},
                                         {"wlan0", false, false, 0, {}, ""}}),
      "  interface  state     Gb/s  PCI           addresses\n"
      "  eth0       up         2.5  0000:01:00.0  10.0.0.1/24 fe80::1/64\n"
      "  lo         loopback     -  -             127.0.0.1/8\n"
      "  wlan0      down         -  -\n");
}

TEST(Report, ShowsSeveralRings) {
  const Machine m = load("h200_node.xml");
  const std::string table = to_table({m}, place({m}, 8, {.device = DeviceKind::kCuda, .context = 4}));
  EXPECT_NE(table.find("  ring 0  0 -> 1 -> 2 -> 3 -> 0\n  ring 1  4 -> 5 -> 6 -> 7 -> 4\n"), std::string::npos)
      << table;
  const std::string many = to_table({m}, place({m}, 64, {.context = 2}));
  EXPECT_NE(many.find("  ring 7  14 -> 15 -> 14\n  and 24 more rings, in the order of the ranks\n"), std::string::npos)
      << many;
}

TEST(Report, ShowsManyRanksAndEscapesNames) {
  Machine m = Machine::from_synthetic("[numa] core:64 pu:1", std::string(300, 'h') + "\x1b[31m\xff\n");
  const Placement p = place({m}, 100);
  std::istringstream lines(topology_table({m}, p));
  for (std::string line; std::getline(lines, line);) {
    EXPECT_LE(line.size(), 120U) << line;
    EXPECT_EQ(line.find('\x1b'), std::string::npos);
  }
  EXPECT_NE(to_table({m}, p).find("* shares a core with another rank: 100 ranks on 64 cores"), std::string::npos);
  EXPECT_NO_THROW(topology_json({{m}}, p).dump());
}

TEST(Report, WritesJson) {
  const Machine m = load("one_socket_gpus.xml");
  const auto json = nlohmann::json::parse(topology_json({{m}}, place({m}, 4, kCuda)).dump());
  EXPECT_EQ(json["hosts"][0]["gpus"][2]["pci"], "0000:41:00.0");
  EXPECT_EQ(json["hosts"][0]["links"][0][2]["kind"], "NVLink");
  EXPECT_EQ(json["hosts"][0]["links"][0][2]["megabytes_per_s"], 300000);
  EXPECT_EQ(json["placement"]["rings"], nlohmann::json({{0, 1, 2, 3}}));
  EXPECT_EQ(json["placement"]["ranks"][2]["gpu"], 3);
  EXPECT_EQ(json["placement"]["ranks"][3]["cpus"], "6-7,22-23");
  EXPECT_EQ(json["placement"]["ranks"][3]["device"], "cuda");
  const auto cpu = topology_json({{m}}, place({m}, 1));
  EXPECT_TRUE(cpu["placement"]["ranks"][0]["gpu_pci"].is_null());
  EXPECT_EQ(cpu["placement"]["ranks"][0]["memory_nodes"], nlohmann::json({0, 1}));
}

}  // namespace
}  // namespace annulus::placement_test
