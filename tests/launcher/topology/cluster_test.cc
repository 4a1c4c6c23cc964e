// Tests of launcher/topology/cluster.h, files that describe clusters: what was written is read back equal, and errors
// in a file are refused by the name of the member.
#include "launcher/topology/cluster.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "common/error.h"
#include "common/files.h"
#include "launcher/topology/placement.h"
#include "launcher/topology/report.h"
#include "tests/launcher/topology/machine_xml.h"

namespace annulus::cluster_test {
namespace {

using nlohmann::json;

Machine load(const std::string& name) { return Machine::from_xml("tests/launcher/topology/testdata/" + name); }

std::string path_of(const std::string& name) { return ::testing::TempDir() + "/" + name; }

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput) << error.what();
    return error.what();
  }
  return "nothing was refused";
}

// A random host; each optional member is present in some of them.
Host any_host(unsigned seed) {
  std::mt19937 random(seed);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  testing::MadeUpMachine made_up;
  made_up.packages = 1 + below(3);
  made_up.nodes_per_package = 1 + below(2);
  made_up.cores_per_node = 1 + below(5);
  made_up.threads_per_core = 1 + below(2);
  for (int p = 0; p < made_up.packages; ++p) made_up.gpus.push_back(below(4));
  made_up.nics_per_package = below(3);
  Host host{Machine::from_xml_text(testing::to_xml(made_up), "made-up"), below(2) == 0};
  Machine& machine = host.machine;
  machine.host = "host-" + std::to_string(seed);
  machine.nvswitches = below(5);
  for (Package& package : machine.packages) package.model = below(2) == 0 ? "" : "A \"processor\", quoted";
  for (size_t i = 0; i < machine.gpus.size(); ++i) {
    machine.gpus[i].memory_bytes = int64_t{below(200)} << 30;
    machine.gpus[i].pci_gigabytes_per_s = below(3) == 0 ? 0 : 63.0153846 / (1 + below(7));
    for (size_t j = 0; j < i && below(2) == 0; ++j) {
      machine.links[i][j] = machine.links[j][i] = {LinkKind::kNvlink, 100000 + below(1000)};
    }
  }
  for (Nic& nic : machine.nics) {
    nic.interface = below(2) == 0 ? "" : "eth" + std::to_string(below(9));
    if (below(4) == 0) nic.pci.clear();
    nic.rdma = below(3) != 0;
    std::vector<RdmaPort> ports;
    for (int p = 1; nic.rdma && p <= below(3); ++p) ports.push_back({p, below(2) == 0, below(2) == 0, below(400000)});
    nic.set_ports(ports);
  }
  if (below(2) == 0) host.visible_devices = below(2) == 0 ? "" : "0,1";
  for (int i = 0; i < below(4); ++i) {
    host.interfaces.push_back({"eth" + std::to_string(i),
                               below(2) == 0,
                               below(2) == 0,
                               below(100000),
                               {"10.0.0." + std::to_string(i) + "/24", "fe80::1/64"},
                               below(2) == 0 ? "" : "0000:1b:00.0"});
  }
  return host;
}

std::vector<Host> all_hosts() {
  std::vector<Host> hosts;
  for (const char* name : {"h200_node.xml", "dgx.xml", "one_socket_gpus.xml"}) hosts.push_back({load(name), true});
  for (const char* text : {"[numa] pu:3", "pack:2 [numa] l3:1 core:4 pu:2", "pack:2 [numa] [numa] core:3 pu:1"}) {
    hosts.push_back({Machine::from_synthetic(text)});
  }
  hosts.push_back(this_host());
  for (unsigned seed = 0; seed < 200; ++seed) hosts.push_back(any_host(seed));
  return hosts;
}

TEST(Cluster, WrittenHostsReadBackEqual) {
  std::vector<Host> hosts = all_hosts();
  const std::string path = path_of("cluster.json");
  write_cluster(path, hosts);
  const std::vector<Host> read = read_cluster(path);
  ASSERT_EQ(read.size(), hosts.size());
  for (size_t i = 0; i < hosts.size(); ++i) {
    hosts[i].machine.is_this_system = false;
    EXPECT_TRUE(read[i] == hosts[i]) << host_to_json(hosts[i]) << "\n" << host_to_json(read[i]);
    EXPECT_EQ(host_to_json(read[i]), host_to_json(hosts[i]));
  }
}

TEST(Cluster, KeepsTheQuotaIfThereIsOne) {
  Host host{Machine::from_synthetic("[numa] core:4 pu:1", "a")};
  EXPECT_FALSE(host_to_json(host).contains("cpu_quota"));
  host.machine.cpu_quota = 1.5;
  EXPECT_EQ(host_from_json(host_to_json(host), "x").machine.cpu_quota, 1.5);
  EXPECT_NE(to_table(host.machine).find("has the time of 1.5 processors"), std::string::npos);
}

TEST(Cluster, PlacementEqualsThatOfTheMachines) {
  const std::vector<Machine> machines = {load("dgx.xml"), load("h200_node.xml")};
  const std::string path = path_of("two.json");
  write_cluster(path, {{machines[0], true}, {machines[1], true}});
  std::vector<Machine> read;
  for (const Host& host : read_cluster(path)) read.push_back(host.machine);
  const PlacementOptions options{.device = DeviceKind::kCuda, .context = 8};
  EXPECT_EQ(to_json(place(read, 16, options)), to_json(place(machines, 16, options)));
}

TEST(Cluster, WritesLongAndInvalidNames) {
  Host host{Machine::from_synthetic("[numa] pu:3", std::string(5000, 'h') + "\x1b\xff\n")};
  host.visible_devices = "\xff";
  const Host read = host_from_json(json::parse(host_to_json(host).dump()), "x");
  EXPECT_EQ(read.machine.host.size(), 4096U);
  EXPECT_EQ(read.visible_devices, "?");
}

TEST(Cluster, RefusesOtherFiles) {
  const std::string path = path_of("other.json");
  const auto reading = [&](const std::string& text) {
    std::ofstream(path, std::ios::trunc) << text;
    return refusal([&] { read_cluster(path); });
  };
  EXPECT_NE(refusal([] { read_cluster("no/such.json"); }).find("no/such.json"), std::string::npos);
  for (const char* text :
       {"[]", "7", "null", R"({"hosts": []})", R"({"format": "annulus checkpoint"})", R"({"format": 7})"}) {
    EXPECT_NE(reading(text).find(path), std::string::npos) << text;
  }
  EXPECT_NE(reading(R"({"format": "another"})").find("that `annulus topology --save FILE` wrote"), std::string::npos);
  EXPECT_NE(reading(R"({"format": "annulus cluster", "version": 2})").find("version 2 of the format"),
            std::string::npos);
  EXPECT_NE(reading(R"({"format": "annulus cluster", "version": 1, "hosts": []})").find("at least one host"),
            std::string::npos);
  EXPECT_NE(reading(std::string(100000, '[')).find("nested too deeply"), std::string::npos);

  write_cluster(path, {any_host(1), any_host(2)});
  const std::string whole = read_small_file("test", path);
  for (size_t cut = 0; cut + 2 < whole.size(); cut += whole.size() / 97) {
    EXPECT_NE(reading(whole.substr(0, cut)).find("not JSON, or cut off"), std::string::npos) << cut;
  }

  std::filesystem::resize_file(path, (uintmax_t{64} << 20) + 1);  // sparse
  EXPECT_NE(refusal([&] { read_cluster(path); }).find(path), std::string::npos);
}

// Each value of a description is removed or replaced by values of every type; the result is read or refused by name.
TEST(Cluster, ChecksEachMember) {
  testing::MadeUpMachine made_up;
  made_up.gpus = {2};
  made_up.nics_per_package = 1;
  Host host{Machine::from_xml_text(testing::to_xml(made_up), "made-up")};
  host.machine.nics.front().set_ports({{1, true, false, 400000}});
  host.machine.cpu_quota = 1.5;
  host.visible_devices = "0";
  host.interfaces.push_back({"eth0", true, false, 1000, {"10.0.0.1/24"}, ""});
  const json whole = host_to_json(host);
  const std::vector<json> values = {nullptr,
                                    true,
                                    -1,
                                    0,
                                    3,
                                    65536,
                                    1e300,
                                    "",
                                    "text",
                                    json::array(),
                                    json::object(),
                                    json::array({7}),
                                    json::array({nullptr})};
  int read = 0, refused = 0;
  const auto try_one = [&](const json& changed, const std::string& where, bool must_refuse) {
    try {
      const Host again = host_from_json(changed, "here.json");
      EXPECT_FALSE(must_refuse) << where;
      for (DeviceKind device : {DeviceKind::kCpu, DeviceKind::kCuda}) {
        place({again.machine}, again.machine.gpus.size() < 2 ? 1 : 2,
              {.device = again.machine.gpus.empty() ? DeviceKind::kCpu : device});
      }
      to_table(again.machine);
      ++read;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInput) << error.what();
      EXPECT_TRUE(error.message().starts_with("here.json: ")) << error.what();
      ++refused;
    }
  };
  const json flat = whole.flatten();
  std::vector<std::string> pointers;
  for (const auto& [pointer, value] : flat.items()) {
    for (json::json_pointer at(pointer); !at.empty(); at = at.parent_pointer()) pointers.push_back(at.to_string());
  }
  for (const std::string& pointer : pointers) {
    const json::json_pointer at(pointer);
    for (const json& value : values) {
      json changed = whole;
      changed[at] = value;
      try_one(changed, pointer + " = " + value.dump(), false);
    }
    json changed = whole;
    const std::string name = at.back();
    if (!changed[at.parent_pointer()].is_object()) continue;
    changed[at.parent_pointer()].erase(name);
    // These members follow from others or are optional.
    const bool free = name == "memory_bytes" || name == "cpus" || name == "visible_devices" || name == "cpu_quota";
    try_one(changed, pointer + " missing", !free);
  }
  EXPECT_GT(read, 100);
  EXPECT_GT(refused, 1000);
}

TEST(Cluster, RefusesContradictions) {
  testing::MadeUpMachine made_up;
  made_up.packages = 2;
  made_up.gpus = {2};
  const json whole = host_to_json({Machine::from_xml_text(testing::to_xml(made_up), "made-up")});
  const auto with = [&](const std::string& pointer, const json& value) {
    json changed = whole;
    changed[json::json_pointer(pointer)] = value;
    return refusal([&] { host_from_json(changed, "h.json"); });
  };
  EXPECT_EQ(with("/packages/1/id", 0),
            "[topology] h.json: packages[1].id should be an id that no other package has, not 0");
  EXPECT_EQ(with("/numa_nodes/1/id", 0),
            "[topology] h.json: numa_nodes[1].id should be an id that no other NUMA node has, not 0");
  EXPECT_EQ(with("/numa_nodes/1/package", 2),
            "[topology] h.json: numa_nodes[1].package should be the id of a package of this host, not 2");
  EXPECT_EQ(with("/gpus/1/numa", json::array({9})),
            "[topology] h.json: gpus[1].numa[0] should be the id of a NUMA node of this host, not 9");
  EXPECT_EQ(with("/cores/1/cpus", "0"),
            "[topology] h.json: cores[1].cpus should be processors of no other core, not \"0\"");
  EXPECT_EQ(with("/gpus/1/pci", whole["gpus"][0]["pci"]),
            "[topology] h.json: gpus[1].pci should be the id of no other GPU, not \"0000:02:00.0\"");
  EXPECT_NE(with("/links/0/1/megabytes_per_s", 5).find("alike in both directions"), std::string::npos);
  EXPECT_NE(with("/links/0/0/kind", "NVLink").find("\"self\" from a GPU to itself alone"), std::string::npos);
  EXPECT_NE(with("/links/0", json::array()).find("links[0] should be as long as the list of GPUs, 2"),
            std::string::npos);
}

}  // namespace
}  // namespace annulus::cluster_test
