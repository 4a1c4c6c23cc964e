// Tests how the job's network becomes variables of NCCL and MPI, and which setting has precedence.
#include "launcher/network/network.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "common/error.h"

namespace annulus::network_test {
namespace {

using Variables = std::vector<Variable>;

// Each test begins without the variables that are read or set here.
class NetworkTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : {"NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "OMPI_MCA_btl_tcp_if_include",
                             "OMPI_MCA_btl_tcp_if_exclude", "OMPI_MCA_btl_openib_if_include", "UCX_NET_DEVICES",
                             "ANNULUS_INTERFACES", "ANNULUS_HCAS", "ANNULUS_RANK_HCA"}) {
      unsetenv(name);
    }
  }
};

TEST_F(NetworkTest, EmptyNetworkSetsNothing) {
  EXPECT_EQ(network_variables({}, "mlx5_3:1"), Variables{});
  EXPECT_EQ(apply_network({}).lines, std::vector<std::string>{});
  EXPECT_EQ(network_variables({.nearest_hca = true}, ""), Variables{}) << "no HCA on this host";
}

TEST_F(NetworkTest, WritesTheFormOfEachLibrary) {
  EXPECT_EQ(network_variables({.interfaces = {"eth0", "ib1"}}, ""),
            (Variables{{"NCCL_SOCKET_IFNAME", "=eth0,ib1"}, {"OMPI_MCA_btl_tcp_if_include", "eth0,ib1"}}));
  EXPECT_EQ(network_variables({.hcas = {"mlx5_0:2", "mlx5_1"}}, "mlx5_7"),
            (Variables{{"NCCL_IB_HCA", "=mlx5_0:2,mlx5_1"},
                       {"OMPI_MCA_btl_openib_if_include", "mlx5_0:2,mlx5_1"},
                       {"UCX_NET_DEVICES", "mlx5_0:2,mlx5_1:1"}}));
  EXPECT_EQ(network_variables({.interfaces = {"eth0"}, .hcas = {"mlx5_0"}}, "").back(),
            (Variable{"UCX_NET_DEVICES", "mlx5_0:1,eth0"}));
}

TEST_F(NetworkTest, UsesNearestHcaOnRequest) {
  const Network network{.hcas = {"mlx5_0", "mlx5_1"}, .nearest_hca = true};
  EXPECT_EQ(network_variables(network, "mlx5_1").front(), (Variable{"NCCL_IB_HCA", "=mlx5_1"}));
  EXPECT_EQ(network_variables(network, "").front(), (Variable{"NCCL_IB_HCA", "=mlx5_0,mlx5_1"}));
}

TEST_F(NetworkTest, KeepsAndReportsUserSettings) {
  setenv("NCCL_SOCKET_IFNAME", "^docker", 1);
  setenv("OMPI_MCA_btl_tcp_if_exclude", "lo", 1);
  const std::vector<std::string> lines =
      apply_network(network_variables({.interfaces = {"eth0"}, .hcas = {"mlx5_0"}}, "")).lines;
  EXPECT_EQ(lines, (std::vector<std::string>{
                       "NCCL_SOCKET_IFNAME=^docker is set in the environment and stays, instead of =eth0",
                       "OMPI_MCA_btl_tcp_if_exclude is set in the environment and stays, instead of "
                       "OMPI_MCA_btl_tcp_if_include=eth0",
                       "NCCL_IB_HCA==mlx5_0",
                       "OMPI_MCA_btl_openib_if_include=mlx5_0",
                       "UCX_NET_DEVICES=mlx5_0:1,eth0",
                   }));
  EXPECT_STREQ(std::getenv("NCCL_SOCKET_IFNAME"), "^docker");
  EXPECT_EQ(std::getenv("OMPI_MCA_btl_tcp_if_include"), nullptr);
  EXPECT_STREQ(std::getenv("NCCL_IB_HCA"), "=mlx5_0");
  EXPECT_STREQ(std::getenv("UCX_NET_DEVICES"), "mlx5_0:1,eth0");
}

TEST_F(NetworkTest, LauncherOptionsOverrideConfiguration) {
  const Network configured{.interfaces = {"eth0"}, .hcas = {"mlx5_0"}};
  EXPECT_EQ(network_from_environment(configured), configured);
  const Network typed{.interfaces = {"ib0", "ib1"}, .nearest_hca = true};
  for (const Variable& v : environment_of(typed)) setenv(v.name.c_str(), v.value.c_str(), 1);
  EXPECT_EQ(network_from_environment(configured),
            (Network{.interfaces = {"ib0", "ib1"}, .hcas = {"mlx5_0"}, .nearest_hca = true}));
  EXPECT_EQ(environment_of({}), Variables{});
}

TEST_F(NetworkTest, RefusesInvalidNames) {
  for (const char* bad : {",", "eth0,", "=eth0", "^docker", "10.0.0.0/8", "eth0 eth1", "eth0:1"}) {
    EXPECT_THROW(parse_network(bad, "", "auto", "test"), Error) << bad;
  }
  for (const char* bad : {",", "=mlx5_0", "mlx5_0:", "mlx5_0:0", "mlx5_0:one", ":1", "mlx5_0:1:1"}) {
    EXPECT_THROW(parse_network("", bad, "auto", "test"), Error) << bad;
  }
  EXPECT_EQ(
      parse_network("enp1s0f0np0,bond0.12", "mlx5_bond_0,rocep1s0f0:1", "nearest", "test"),
      (Network{
          .interfaces = {"enp1s0f0np0", "bond0.12"}, .hcas = {"mlx5_bond_0", "rocep1s0f0:1"}, .nearest_hca = true}));
  EXPECT_EQ(parse_network("", "", "auto", "test"), Network{});
  setenv("ANNULUS_RANK_HCA", "near", 1);
  EXPECT_THROW(network_from_environment({}), Error);
}

}  // namespace
}  // namespace annulus::network_test
