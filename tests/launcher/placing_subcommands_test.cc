// Tests what `topology` and `launch --dry-run` show: the placement that a job would use, and nothing else.
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "common/files.h"
#include "launcher/subcommand.h"
#include "launcher/topology/cluster.h"

namespace annulus {

// A subcommand of ranks, which `launch` can start.
class ProbeSubcommand : public Subcommand {
 public:
  void declare(CLI::App& app) override { app.footer("Example:\n  ./annulus launch -n 2 probe"); }
  int run() override { return 0; }
};

const std::vector<SubcommandEntry>& subcommands() {
  static const std::vector<SubcommandEntry> all = {
      {"launch", "", false, make_launch_subcommand},
      {"topology", "", false, make_topology_subcommand},
      {"probe", "", true, []() -> std::unique_ptr<Subcommand> { return std::make_unique<ProbeSubcommand>(); }},
  };
  return all;
}

namespace {

std::string said_by(const std::string& subcommand, const std::vector<std::string>& args) {
  ParsedSubcommand parsed = parse_subcommand(find_subcommand(subcommand), args);
  ::testing::internal::CaptureStdout();
  try {
    EXPECT_EQ(parsed.subcommand->run(), 0);
  } catch (...) {
    ::testing::internal::GetCapturedStdout();
    throw;
  }
  return ::testing::internal::GetCapturedStdout();
}

std::set<std::string> nics_of(const std::vector<std::string>& more) {
  std::vector<std::string> args = {"--json", "--xml", "tests/launcher/topology/testdata/h200_node.xml", "-n", "8"};
  args.insert(args.end(), more.begin(), more.end());
  std::set<std::string> nics;
  const nlohmann::json said = nlohmann::json::parse(said_by("topology", args));
  for (const nlohmann::json& rank : said.at("placement").at("ranks")) nics.insert(rank.at("nic").get<std::string>());
  return nics;
}

TEST(TopologySubcommand, ShowsTheHcasOfTheJob) {
  using Nics = std::set<std::string>;
  unsetenv("ANNULUS_HCAS");
  EXPECT_EQ(nics_of({}), (Nics{"mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"}));
  EXPECT_EQ(nics_of({"--hcas", "mlx5_1,mlx5_2:1"}), (Nics{"mlx5_1", "mlx5_2"}));
  setenv("ANNULUS_HCAS", "mlx5_1,mlx5_2", 1);
  EXPECT_EQ(nics_of({}), (Nics{"mlx5_1", "mlx5_2"}));
  EXPECT_EQ(nics_of({"--hcas", "mlx5_3"}), Nics{"mlx5_3"}) << "the option has precedence over the variable";
  unsetenv("ANNULUS_HCAS");
}

TEST(TopologySubcommand, ShowsTheDeviceOfTheJob) {
  const std::vector<std::string> args = {"--xml", "tests/launcher/topology/testdata/one_socket_gpus.xml", "-n", "2"};
  const auto nodes = [&](const std::string& device) {
    std::vector<std::string> with = args;
    with.insert(with.end(), {"--json", "--device", device});
    std::set<int> found;
    const nlohmann::json said = nlohmann::json::parse(said_by("topology", with));
    for (const nlohmann::json& rank : said.at("placement").at("ranks")) found.insert(rank.at("numa").get<int>());
    return found;
  };
  EXPECT_EQ(nodes("auto"), std::set<int>{0});
  EXPECT_EQ(nodes("cuda"), std::set<int>{0});
  EXPECT_EQ(nodes("cpu"), (std::set<int>{0, 1}));
  EXPECT_ANY_THROW(parse_subcommand(find_subcommand("topology"), {"--device", "gpu"}));
}

TEST(TopologySubcommand, PlacesRanksOnSavedHosts) {
  const std::string path = ::testing::TempDir() + "/two hosts; \"quoted\".json";
  const std::string xml = "tests/launcher/topology/testdata/one_socket_gpus.xml";
  const std::vector<std::string> placed = {"-n", "8", "--context", "4", "--json"};
  const auto with = [&](std::vector<std::string> args) {
    args.insert(args.end(), placed.begin(), placed.end());
    return said_by("topology", args);
  };
  const std::string there = with({"--xml", xml, "--xml", xml, "--save", path});
  EXPECT_EQ(with({"--load", path}), there);
  EXPECT_EQ(with({"--load", path, "--save", path}), there);
  EXPECT_EQ(nlohmann::json::parse(there).at("hosts").size(), 2U);
  EXPECT_ANY_THROW(with({"--load", path, "--xml", xml}));
  EXPECT_ANY_THROW(with({"--load", xml}));
  EXPECT_ANY_THROW(with({"--xml", xml, "--save", "no/such/folder/x.json"}));
}

TEST(TopologySubcommand, SavesAllDevicesWhateverTheJobUses) {
  const std::string path = ::testing::TempDir() + "/whole.json";
  EXPECT_EQ(nics_of({"--hcas", "mlx5_1", "--save", path}), std::set<std::string>{"mlx5_1"});
  const nlohmann::json said = nlohmann::json::parse(said_by("topology", {"--load", path, "--json"}));
  EXPECT_EQ(said.at("hosts").at(0).at("nics").size(), 4U);
}

TEST(TopologySubcommand, ShowsInterfacesAndWhatLibrariesAreTold) {
  Host host{Machine::from_xml("tests/launcher/topology/testdata/h200_node.xml"), /*cuda=*/true};
  host.interfaces.push_back({"eth0", true, false, 10000, {"10.0.0.1/24"}, ""});
  const std::string path = ::testing::TempDir() + "/network.json";
  write_cluster(path, {host, host});
  const std::string all = said_by("topology", {"--load", path});
  EXPECT_NE(all.find("10.0.0.1/24"), std::string::npos) << all;
  EXPECT_NE(all.find("  NCCL and MPI choose what they use\n"), std::string::npos) << all;
  const nlohmann::json one = nlohmann::json::parse(
      said_by("topology", {"--load", path, "--interfaces", "eth1", "--hcas", "mlx5_3", "--json"}));
  const nlohmann::json told = {"NCCL_SOCKET_IFNAME==eth1", "OMPI_MCA_btl_tcp_if_include=eth1", "NCCL_IB_HCA==mlx5_3",
                               "OMPI_MCA_btl_openib_if_include=mlx5_3", "UCX_NET_DEVICES=mlx5_3:1,eth1"};
  EXPECT_EQ(one.at("network"), nlohmann::json({told, told}));
  setenv("NCCL_SOCKET_IFNAME", "ib", 1);
  setenv("UCX_TLS", "tcp", 1);
  const std::string here = said_by("topology", {"-n", "1", "--interfaces", "eth1"});
  EXPECT_NE(here.find("network of host "), std::string::npos);
  EXPECT_NE(here.find("  NCCL_SOCKET_IFNAME=ib is set in the environment and stays, instead of =eth1\n"),
            std::string::npos)
      << here;
  EXPECT_NE(here.find("  UCX_TLS=tcp is set in the environment\n"), std::string::npos) << here;
  unsetenv("NCCL_SOCKET_IFNAME");
  unsetenv("UCX_TLS");
}

TEST(TopologySubcommand, RefusesSeveralSourcesOfHosts) {
  const std::string xml = "tests/launcher/topology/testdata/h200_node.xml";
  const nlohmann::json here =
      nlohmann::json::parse(said_by("topology", {"--hosts", "localhost:3", "--device", "cpu", "--json"}));
  EXPECT_EQ(here.at("placement").at("ranks").size(), 3U) << "as many ranks as slots";
  EXPECT_ANY_THROW(said_by("topology", {"--hosts", "localhost:3", "-n", "4", "--device", "cpu"}));
  EXPECT_ANY_THROW(said_by("topology", {"--hosts", "localhost", "--xml", xml}));
  EXPECT_ANY_THROW(said_by("topology", {"--hosts", "localhost", "--load", xml}));
  EXPECT_ANY_THROW(said_by("topology", {"--hosts", "localhost", "--hostfile", xml}));
  EXPECT_ANY_THROW(said_by("topology", {"--hosts", "a;b"}));
}

TEST(TopologySubcommand, UsesSlurmAllocationByDefault) {
  const std::vector<std::pair<const char*, const char*>> slurm = {
      {"SLURM_JOB_ID", "7"}, {"SLURM_JOB_NODELIST", "localhost"}, {"SLURM_TASKS_PER_NODE", "3"}, {"SLURM_NTASKS", "3"}};
  for (const auto& [name, value] : slurm) setenv(name, value, 1);
  const auto ranks = [](const std::vector<std::string>& more) {
    std::vector<std::string> args = {"--device", "cpu", "--json"};
    args.insert(args.end(), more.begin(), more.end());
    return nlohmann::json::parse(said_by("topology", args)).at("placement").at("ranks").size();
  };
  EXPECT_EQ(ranks({}), 3U) << "as many ranks as tasks";
  EXPECT_EQ(ranks({"--hosts", "localhost:2"}), 2U);
  EXPECT_EQ(ranks({"--xml", "tests/launcher/topology/testdata/h200_node.xml", "-n", "5"}), 5U);
  for (const auto& [name, value] : slurm) unsetenv(name);
}

TEST(TopologySubcommand, DrawsPlacementAsSvg) {
  const std::string path = ::testing::TempDir() + "/picture.svg";
  said_by("topology",
          {"--xml", "tests/launcher/topology/testdata/h200_node.xml", "-n", "8", "--context", "4", "--svg", path});
  const std::string svg = read_small_file("test", path);
  EXPECT_TRUE(svg.starts_with("<svg")) << svg;
  EXPECT_NE(svg.find("ring 1: ranks 4 to 7"), std::string::npos) << svg;
}

TEST(LaunchSubcommand, PlansPlacementOnlyForRanksOnThisHost) {
  for (const char* name : {"SLURM_JOB_NUM_NODES", "SLURM_NNODES", "OMPI_MCA_orte_default_hostfile"}) unsetenv(name);
  const std::string many = std::to_string(std::thread::hardware_concurrency() + 2);
  const std::string here = said_by("launch", {"-n", many, "--dry-run", "probe"});
  EXPECT_NE(here.find("placement of " + many + " ranks"), std::string::npos) << here;
  EXPECT_NE(here.find("OVERSUBSCRIBE"), here.find("--oversubscribe")) << "expected one of the two spellings: " << here;
  const std::string named = said_by("launch", {"-n", many, "--mpi-args", "--hostfile hosts", "--dry-run", "probe"});
  EXPECT_EQ(named.find("placement of"), std::string::npos) << named;
  EXPECT_NE(named.find("the hosts are named by --hostfile"), std::string::npos) << named;
  EXPECT_EQ(named.find("oversubscribe"), std::string::npos) << named;
  EXPECT_EQ(named.find("OVERSUBSCRIBE"), std::string::npos) << named;
  EXPECT_NE(named.find("--hostfile hosts"), std::string::npos) << named;
}

}  // namespace
}  // namespace annulus
