// Tests which interfaces and RDMA devices MPI and NCCL are expected to use, on described hosts.
#include "launcher/network/use.h"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

namespace annulus::network_use_test {
namespace {

using Names = std::vector<std::string>;
using Environment = std::map<std::string, std::string>;

Host host_with(const std::vector<std::string>& up, bool hcas) {
  Host host{Machine::from_xml("tests/launcher/topology/testdata/h200_node.xml"), /*cuda=*/true};
  for (const std::string& name : up) host.interfaces.push_back({name, true, name == "lo", 1000, {"10.0.0.1/24"}, ""});
  host.interfaces.push_back({"eth9", false, false, 1000, {"10.0.9.1/24"}, ""});  // down
  host.interfaces.push_back({"eth8", true, false, 1000, {}, ""});                // without an address
  for (Nic& nic : host.machine.nics) nic.set_ports({{1, hcas && nic.name != "mlx5_3", false, 400000}});
  return host;
}

NetworkUse of(const std::string& user, const Host& host, const Network& network = {},
              const Environment& environment = {}) {
  for (const NetworkUse& use : network_use(host, network, environment)) {
    if (use.user == user) return use;
  }
  return {};
}

TEST(NetworkUse, DefaultsToInterfacesThatAreUp) {
  const Host host = host_with({"docker0", "eth0", "eth1", "lo"}, /*hcas=*/false);
  EXPECT_EQ(of("mpirun's daemons", host),
            (NetworkUse{"mpirun's daemons", {"docker0", "eth0", "eth1"}, "TCP", "all that are up"}));
  EXPECT_EQ(of("MPI", host), (NetworkUse{"MPI", {"docker0", "eth0", "eth1"}, "TCP", "all that are up"}));
  EXPECT_EQ(of("NCCL", host), (NetworkUse{"NCCL", {"eth0", "eth1"}, "sockets", "its own choice"}));
}

TEST(NetworkUse, NcclPrefersInfinibandOverDockerAndLoopback) {
  EXPECT_EQ(of("NCCL", host_with({"docker0", "eth0", "ib0", "ibp1", "lo"}, false)).devices, (Names{"ib0", "ibp1"}));
  EXPECT_EQ(of("NCCL", host_with({"docker0", "lo"}, false)).devices, Names{"docker0"});
  EXPECT_EQ(of("NCCL", host_with({"lo", "virbr0"}, false)).devices, Names{"lo"});
  EXPECT_EQ(of("NCCL", host_with({}, false)).devices, Names{});
  Host none = host_with({"eth0"}, false);
  none.cuda = false;
  EXPECT_EQ(of("NCCL", none), NetworkUse{});
}

TEST(NetworkUse, UsesRdmaWhereAPortIsActive) {
  const Host host = host_with({"eth0", "lo"}, /*hcas=*/true);
  const Names ports = {"mlx5_0:1", "mlx5_1:1", "mlx5_2:1"};
  EXPECT_EQ(of("MPI", host), (NetworkUse{"MPI", ports, "RDMA (UCX, or verbs in Open MPI 4)", "active ports"}));
  EXPECT_EQ(of("NCCL", host),
            (NetworkUse{"NCCL", ports, "RDMA, each GPU the nearest; connecting over eth0", "active ports"}));
  EXPECT_EQ(of("mpirun's daemons", host).devices, Names{"eth0"});
}

TEST(NetworkUse, FollowsTheNetworkOfTheJob) {
  const Host host = host_with({"docker0", "eth0", "eth1", "lo"}, /*hcas=*/true);
  const Network network{{"eth1"}, {"mlx5_1", "mlx5_2:1", "mlx5_3"}};
  EXPECT_EQ(of("mpirun's daemons", host, network),
            (NetworkUse{"mpirun's daemons", {"eth1"}, "TCP", "named for the job"}));
  EXPECT_EQ(of("MPI", host, network).devices, (Names{"mlx5_1:1", "mlx5_2:1"}));
  EXPECT_EQ(
      of("NCCL", host, network),
      (NetworkUse{
          "NCCL", {"mlx5_1:1", "mlx5_2:1"}, "RDMA, each GPU the nearest; connecting over eth1", "named for the job"}));
  const Host slow = host_with({"eth0", "eth1"}, /*hcas=*/false);
  EXPECT_EQ(of("MPI", slow, network), (NetworkUse{"MPI", {"eth1"}, "TCP", "named for the job"}));
  EXPECT_EQ(of("NCCL", slow, {{"eth9"}}).devices, Names{}) << "it is down";
}

TEST(NetworkUse, EnvironmentOverridesTheNetworkOfTheJob) {
  const Host host = host_with({"eth0", "eth1", "ib0", "lo"}, /*hcas=*/true);
  const auto devices = [&](const std::string& user, const Environment& environment) {
    return of(user, host, {{"eth0"}, {}}, environment).devices;
  };
  EXPECT_EQ(devices("NCCL", {{"NCCL_IB_DISABLE", "1"}}), Names{"eth0"});
  EXPECT_EQ(devices("NCCL", {{"NCCL_NET", "Socket"}, {"NCCL_SOCKET_IFNAME", "eth"}}), (Names{"eth0", "eth1"}));
  EXPECT_EQ(devices("NCCL", {{"NCCL_IB_DISABLE", "1"}, {"NCCL_SOCKET_IFNAME", "^=eth0,lo"}}), (Names{"eth1", "ib0"}));
  EXPECT_EQ(devices("NCCL", {{"NCCL_IB_HCA", "^mlx5_0,mlx5_1:1"}}), Names{"mlx5_2:1"});
  EXPECT_EQ(devices("NCCL", {{"NCCL_IB_HCA", "=mlx5_0:2,mlx5_1"}}), Names{"mlx5_1:1"});
  EXPECT_EQ(devices("MPI", {{"OMPI_MCA_pml", "ob1"}, {"OMPI_MCA_btl_tcp_if_include", "eth1,10.0.0.0/8"}}),
            (Names{"eth1", "10.0.0.0/8"}));
  EXPECT_EQ(devices("MPI", {{"OMPI_MCA_btl", "self,tcp"}}), Names{"eth0"});
  EXPECT_EQ(devices("MPI", {{"UCX_NET_DEVICES", "mlx5_2:1,eth0"}}), Names{"mlx5_2:1"});
  const NetworkUse use = of("mpirun's daemons", host, {}, {{"OMPI_MCA_oob_tcp_if_exclude", "lo,eth0"}});
  EXPECT_EQ(use, (NetworkUse{"mpirun's daemons", {"eth1", "ib0"}, "TCP", "OMPI_MCA_oob_tcp_if_exclude=lo,eth0"}));
}

TEST(NetworkUse, RecognizesNetworkVariables) {
  for (const char* name : {"NCCL_NET", "UCX_TLS", "OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include",
                           "PRTE_MCA_prte_if_include", "PRTE_MCA_prte_if_exclude"}) {
    EXPECT_TRUE(is_network_variable(name)) << name;
  }
  // Variables by which mpirun tells each rank its place in the job.
  for (const char* name : {"OMPI_MCA_ess", "OMPI_MCA_orte_hnp_uri", "PRTE_MCA_ess_base_nspace", "PATH"}) {
    EXPECT_FALSE(is_network_variable(name)) << name;
  }
}

}  // namespace
}  // namespace annulus::network_use_test
