// Tests where a rank is placed, what it is bound to and which settings NCCL and MPI get, on described machines: with
// the configured device, with launchers that give little information, and where CUDA shows other GPUs than its
// variables suggest.
#include "launcher/launch/rank_place.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "launcher/network/network.h"
#include "launcher/rank_locations.h"
#include "launcher/topology/host_plan.h"
#include "launcher/topology/machine.h"

namespace annulus::rank_place_test {
namespace {

// Two sockets of 8 cores; GPUs 0-3 and mlx5_0, mlx5_1 on the first, GPUs 4-7 and mlx5_2, mlx5_3 on the second.
Host h200() {
  Host host{Machine::from_xml("tests/launcher/topology/testdata/h200_node.xml"), /*cuda=*/true};
  host.machine.is_this_system = true;
  return host;
}

// Two sockets, all GPUs on the first.
Host one_socket() {
  Host host{Machine::from_xml("tests/launcher/topology/testdata/one_socket_gpus.xml"), /*cuda=*/true};
  host.machine.is_this_system = true;
  return host;
}

LaunchInfo launched(int size, int local_rank, int local_size) {
  LaunchInfo info;
  info.launched = true;
  info.rank = info.local_rank = local_rank;
  info.size = size;
  info.local_size = local_size;
  return info;
}

std::vector<std::string> gpus(const Machine& machine, const std::vector<size_t>& which) {
  std::vector<std::string> ids;
  for (const size_t i : which) ids.push_back(machine.gpus[i].pci);
  return ids;
}

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

class RankPlaceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : {"NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "OMPI_MCA_btl_tcp_if_include",
                             "OMPI_MCA_btl_openib_if_include", "UCX_NET_DEVICES", "ANNULUS_BIND"}) {
      unsetenv(name);
    }
  }

  RankPlace place_on_this(const Host& host) {
    return RankPlace(
        {.read = [host](bool) { return host; }, .bind = [this](const RankPlacement& r) { bound.push_back(r); }});
  }

  std::vector<RankPlacement> bound;  // in the order of the calls
};

TEST(HostPlan, CpuRanksUseAllSockets) {
  for (const std::string device : {"auto", "cuda", "cpu"}) {
    const Placement placement = place_on(one_socket(), {.ranks = 2, .device = device}).placement;
    EXPECT_EQ(placement.ranks[0].device, device == "cpu" ? DeviceKind::kCpu : DeviceKind::kCuda) << device;
    EXPECT_EQ(placement.ranks[1].numa_node, device == "cpu" ? 1 : 0) << device;
  }
}

TEST(HostPlan, UsesGpusWhenEnoughAreVisible) {
  Host host = h200();
  const auto device = [&](int ranks) { return place_on(host, {.ranks = ranks}).placement.ranks.front().device; };
  EXPECT_EQ(device(8), DeviceKind::kCuda);
  EXPECT_EQ(device(9), DeviceKind::kCpu);
  host.visible_devices = "4,5";
  EXPECT_EQ(device(3), DeviceKind::kCpu);
  EXPECT_EQ(place_on(host, {.ranks = 2}).placement.ranks.front().numa_node, 1);
  host.cuda = false;
  EXPECT_EQ(device(1), DeviceKind::kCpu);
}

TEST_F(RankPlaceTest, BindsForTheConfiguredDevice) {
  RankPlace place = place_on_this(one_socket());
  EXPECT_EQ(place.take(launched(2, 1, 2), {.device = "cpu"}), 8);
  ASSERT_EQ(bound.size(), 1U);
  EXPECT_EQ(bound[0].memory_nodes, std::vector<int>{1});
  EXPECT_EQ(bound[0].gpu, -1);
  EXPECT_EQ(place.carry_out(1, /*gpu=*/false), std::nullopt);
  EXPECT_EQ(bound.size(), 1U) << "the rank is bound there already";
}

TEST_F(RankPlaceTest, UnboundRankKnowsItsHca) {
  setenv("ANNULUS_BIND", "0", 1);
  RankPlace place = place_on_this(h200());
  EXPECT_EQ(place.take(launched(8, 5, 8), {}), std::nullopt);
  EXPECT_TRUE(bound.empty());
  EXPECT_EQ(place.text(), "");
  set_job_network({.nearest_hca = true}, launched(8, 5, 8), place);
  EXPECT_EQ(variable("NCCL_IB_HCA"), "=" + place.ranks().at(5).hca);
  EXPECT_EQ(place.ranks().at(5).hca.substr(0, 6), "mlx5_2");
}

// As under srun: how many ranks share the host is known only after the bootstrap, when MPI has already started.
TEST_F(RankPlaceTest, SetsNearestHcaForNcclWhenLocalSizeIsKnownLate) {
  const Host host = h200();
  RankPlace place = place_on_this(host);
  EXPECT_EQ(place.take(launched(8, 5, -1), {.hcas = {"mlx5_0", "mlx5_3"}}), std::nullopt);
  set_job_network({.hcas = {"mlx5_0", "mlx5_3"}, .nearest_hca = true}, launched(8, 5, -1), place);
  EXPECT_EQ(variable("NCCL_IB_HCA"), "=mlx5_0,mlx5_3");
  EXPECT_NE(network_lines().back().find("does not say how many ranks share this host"), std::string::npos);
  place.place_on_gpus(gpus(host.machine, {0, 1, 2, 3, 4, 5, 6, 7}), 8, 8);
  EXPECT_EQ(place.carry_out(5, /*gpu=*/true), std::nullopt);
  EXPECT_TRUE(bound.empty()) << "srun has bound the rank";
  update_job_network(5, /*gpu=*/true, place);
  EXPECT_EQ(variable("NCCL_IB_HCA"), "=mlx5_3");
  EXPECT_EQ(variable("UCX_NET_DEVICES"), "mlx5_0:1,mlx5_3:1") << "MPI has started";
  EXPECT_EQ(network_lines().front(), "  network: NCCL_IB_HCA==mlx5_3");
  EXPECT_NE(network_lines().back().find("not known when MPI started"), std::string::npos);
}

// With UUIDs in CUDA_VISIBLE_DEVICES, only CUDA can tell which GPUs are hidden.
TEST_F(RankPlaceTest, RebindsWhenCudaShowsOtherGpus) {
  const Host host = h200();
  RankPlace place = place_on_this(host);
  EXPECT_TRUE(place.take(launched(2, 0, 2), {}));
  ASSERT_EQ(bound.size(), 1U);
  const std::vector<int> before = bound[0].memory_nodes;
  set_job_network({.nearest_hca = true}, launched(2, 0, 2), place);
  const std::string told = variable("NCCL_IB_HCA");
  // The GPUs of the other socket.
  const bool first = before == std::vector<int>{0};
  place.place_on_gpus(gpus(host.machine, first ? std::vector<size_t>{4, 5} : std::vector<size_t>{0, 1}), 2, 2);
  EXPECT_EQ(place.carry_out(0, /*gpu=*/true), place.ranks()[0].threads);
  update_job_network(0, /*gpu=*/true, place);
  ASSERT_EQ(bound.size(), 2U);
  EXPECT_EQ(bound[1].memory_nodes, std::vector<int>{first ? 1 : 0});
  EXPECT_NE(variable("NCCL_IB_HCA"), told);
  EXPECT_EQ(variable("NCCL_IB_HCA"), "=" + place.ranks()[0].hca);
  EXPECT_EQ("=" + variable("OMPI_MCA_btl_openib_if_include"), told) << "MPI has started";
}

TEST_F(RankPlaceTest, KeepsUserNcclSettings) {
  const Host host = h200();
  setenv("NCCL_IB_HCA", "mlx5", 1);
  RankPlace place = place_on_this(host);
  place.take(launched(2, 0, 2), {});
  set_job_network({.nearest_hca = true}, launched(2, 0, 2), place);
  const bool first = place.ranks()[0].numa_node == 0;
  place.place_on_gpus(gpus(host.machine, first ? std::vector<size_t>{4, 5} : std::vector<size_t>{0, 1}), 2, 2);
  update_job_network(0, /*gpu=*/true, place);
  EXPECT_EQ(variable("NCCL_IB_HCA"), "mlx5");
}

// device = "auto" on a machine whose GPUs CUDA cannot use.
TEST_F(RankPlaceTest, RebindsForTheCpuWhenGpusAreUnusable) {
  RankPlace place = place_on_this(one_socket());
  EXPECT_TRUE(place.take(launched(2, 1, 2), {}));
  ASSERT_EQ(bound.size(), 1U);
  EXPECT_EQ(bound[0].memory_nodes, std::vector<int>{0});
  EXPECT_EQ(place.carry_out(1, /*gpu=*/false), 8);
  ASSERT_EQ(bound.size(), 2U);
  EXPECT_EQ(bound[1].memory_nodes, std::vector<int>{1});
  EXPECT_EQ(place.ranks()[1].gpu, -1);
}

}  // namespace
}  // namespace annulus::rank_place_test
