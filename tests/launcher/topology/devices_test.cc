// Tests of launcher/topology/nvidia_driver.h and launcher/topology/rdma.h, which add to a machine what the driver's
// library and the kernel report: NVLinks, NVSwitches, the GPUs visible in a container, and RDMA devices with their
// ports. The library is fake_nvml.cc; no GPU is needed.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "launcher/topology/nvidia_driver.h"
#include "launcher/topology/placement.h"
#include "launcher/topology/rdma.h"
#include "tests/launcher/topology/machine_xml.h"

namespace annulus::devices_test {
namespace {

constexpr const char* kFake = "tests/launcher/topology/libfake_nvml.so";

Machine load(const std::string& name) { return Machine::from_xml("tests/launcher/topology/testdata/" + name); }

// Four GPUs on two packages, with links from the PCI tree only.
Machine four_gpus() { return Machine::from_xml_text(testing::to_xml({.packages = 2, .gpus = {2, 2}}), "made-up"); }

bool add(Machine& machine, const std::string& told) {
  setenv("FAKE_NVML", told.c_str(), 1);
  return add_nvml(machine, kFake);
}

TEST(Nvml, WithoutLibraryOrDriverTheMachineIsUnchanged) {
  const Machine before = four_gpus();
  Machine machine = before;
  EXPECT_FALSE(add_nvml(machine, "libno-such-driver.so.1"));
  EXPECT_EQ(machine, before);
  unsetenv("FAKE_NVML");
  EXPECT_FALSE(add_nvml(machine, kFake));
  EXPECT_EQ(machine, before);
}

TEST(Nvml, ReadsLinksBetweenGpus) {
  Machine machine = four_gpus();
  const std::vector<Gpu> gpus = machine.gpus;
  ASSERT_EQ(gpus.size(), 4U);
  // GPUs 0 and 3 have a bridge of two links, 1 and 2 one link with a lower speed on one side, and 0 and 1 a link that
  // is down.
  std::string told;
  const auto gpu = [&](size_t i, const std::string& links) { told += "gpu " + gpus[i].pci + " NVIDIA A100\n" + links; };
  const auto link = [&](const char* kind, size_t to, int speed) {
    return std::string("link ") + kind + " " + gpus[to].pci + " " + std::to_string(speed) + "\n";
  };
  gpu(0, link("gpu", 3, 100000) + link("gpu", 3, 100000) + link("down", 1, 25000));
  gpu(1, link("gpu", 2, 100000) + link("down", 0, 25000));
  gpu(2, link("gpu", 1, 80000));
  gpu(3, link("gpu", 0, 100000) + link("gpu", 0, 100000));
  ASSERT_TRUE(add(machine, told));
  EXPECT_EQ(machine.links[0][3], (Link{LinkKind::kNvlink, 200000}));
  EXPECT_EQ(machine.links[3][0], (Link{LinkKind::kNvlink, 200000}));
  EXPECT_EQ(machine.links[1][2], (Link{LinkKind::kNvlink, 80000})) << "the lower of the two speeds";
  EXPECT_EQ(machine.links[0][1], four_gpus().links[0][1]);
  EXPECT_EQ(machine.nvswitches, 0);
  EXPECT_EQ(machine.gpus[0].model, "NVIDIA A100");
  EXPECT_EQ(machine.gpus[0].memory_bytes, int64_t{80} << 30);
  EXPECT_EQ(machine.gpus[0].numa, gpus[0].numa);
  // The rings use these links.
  const Placement placement = place({machine}, 4, {.device = DeviceKind::kCuda, .context = 2});
  for (const Hop& hop : placement.hops) EXPECT_EQ(hop.link.kind, LinkKind::kNvlink);
}

TEST(Nvml, SwitchesConnectAllGpusLinkedToThem) {
  Machine machine = four_gpus();
  std::string told;
  for (const Gpu& gpu : machine.gpus) {
    told += "gpu " + gpu.pci + " NVIDIA H100\n";
    for (int i = 0; i < 4; ++i) told += "link switch 0000:f" + std::to_string(i / 2) + ":00.0 26562\n";
  }
  ASSERT_TRUE(add(machine, told));
  for (size_t i = 0; i < 4; ++i) {
    for (size_t j = 0; j < 4; ++j) {
      EXPECT_EQ(machine.links[i][j], i == j ? Link(LinkKind::kSelf, 0) : Link(LinkKind::kNvlink, 4 * 26562));
    }
  }
  EXPECT_EQ(machine.nvswitches, 2);
}

TEST(Nvml, GpuWithoutLinksKeepsItsPciLinks) {
  Machine machine = four_gpus();
  std::string told;
  for (size_t i = 0; i < 4; ++i) {
    told += "gpu " + machine.gpus[i].pci + " NVIDIA H100\n";
    if (i > 0) told += "link switch 0000:f0:00.0 26562\n";
  }
  ASSERT_TRUE(add(machine, told));
  EXPECT_EQ(machine.links[1][3], (Link{LinkKind::kNvlink, 26562}));
  EXPECT_EQ(machine.links[0], four_gpus().links[0]);
}

TEST(Nvml, AssumesDefaultsWhereTheDriverReportsNothing) {
  Machine machine = four_gpus();
  std::string told;
  for (const Gpu& gpu : machine.gpus) told += "gpu " + gpu.pci + " -\nlink switch - 0\n";
  const std::string model = machine.gpus[0].model;
  ASSERT_TRUE(add(machine, told));
  EXPECT_EQ(machine.links[0][3], (Link{LinkKind::kNvlink, 25000}));
  EXPECT_EQ(machine.nvswitches, 1);
  EXPECT_EQ(machine.gpus[0].model, model);
}

TEST(Nvml, KeepsTheNvlinksThatHwlocReports) {
  Machine machine = load("h200_node.xml");
  std::string told;
  for (const Gpu& gpu : machine.gpus) told += "gpu " + gpu.pci + " NVIDIA H200\nlink switch 0000:f0:00.0 1000\n";
  ASSERT_TRUE(add(machine, told));
  EXPECT_EQ(machine, load("h200_node.xml"));
}

TEST(Nvml, ContainerHasOnlyTheGpusOfTheDriver) {
  Machine machine = load("dgx.xml");
  const std::string told = "locked\ngpu " + machine.gpus[5].pci + " NVIDIA H100\ngpu " + machine.gpus[2].pci +
                           " NVIDIA H100\ngpu 0000:fe:00.0 NVIDIA H100\n";
  const std::vector<Gpu> all = machine.gpus;
  ASSERT_TRUE(add(machine, told));
  ASSERT_EQ(machine.gpus.size(), 3U);
  EXPECT_EQ(machine.gpus[0].pci, all[2].pci);
  EXPECT_EQ(machine.gpus[1].pci, all[5].pci);
  EXPECT_EQ(machine.gpus[1].numa, all[5].numa);
  EXPECT_EQ(machine.gpus[2].pci, "0000:fe:00.0");
  ASSERT_TRUE(add(machine, "locked\n"));
  EXPECT_TRUE(machine.gpus.empty());
}

// Makes a folder like /sys/class/infiniband.
class Rdma : public ::testing::Test {
 protected:
  Rdma() : folder_(::testing::TempDir() + "/rdma-" + ::testing::UnitTest::GetInstance()->current_test_info()->name()) {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }

  void write(const std::string& file, const std::string& text) {
    const std::filesystem::path path = folder_ + "/" + file;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text << "\n";
  }
  void port(const std::string& path, const std::string& state, const std::string& rate, const std::string& layer) {
    write(path + "/state", state);
    write(path + "/rate", rate);
    write(path + "/link_layer", layer);
  }
  void pci(const std::string& device, const std::string& id, const std::string& node) {
    const std::string target = folder_ + "-pci/" + id;
    std::filesystem::create_directories(target);
    std::filesystem::create_directories(folder_ + "/" + device);
    std::ofstream(target + "/numa_node") << node << "\n";
    std::filesystem::create_directory_symlink(target, folder_ + "/" + device + "/device");
  }

  std::string folder_;
};

TEST_F(Rdma, AddsPortsToKnownDevices) {
  Machine machine = load("h200_node.xml");
  const std::vector<Nic> before = machine.nics;
  port("mlx5_1/ports/1", "4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand");
  port("mlx5_2/ports/1", "1: DOWN", "2.5 Gb/sec (1X SDR)", "Ethernet");
  port("mlx5_2/ports/2", "4: ACTIVE", "100 Gb/sec (4X EDR)", "Ethernet");
  port("mlx5_3/ports/1", "1: DOWN", "10 Gb/sec (4X SDR)", "InfiniBand");
  port("mlx5_3/ports/x", "4: ACTIVE", "1 Gb/sec", "InfiniBand");
  add_rdma(machine, folder_);
  ASSERT_EQ(machine.nics.size(), 4U);
  EXPECT_EQ(machine.nics[0], before[0]) << "this folder does not have the device";
  EXPECT_EQ(machine.nics[1].ports, (std::vector<RdmaPort>{{1, true, false, 400000}}));
  EXPECT_TRUE(machine.nics[1].active);
  EXPECT_EQ(machine.nics[2].ports, (std::vector<RdmaPort>{{1, false, true, 2500}, {2, true, true, 100000}}));
  EXPECT_EQ(machine.nics[2].port, 2);
  EXPECT_FALSE(machine.nics[3].active);
  EXPECT_EQ(machine.nics[3].interface, before[3].interface);
  // Ranks get only NICs with a port that is up.
  for (const RankPlacement& rank : place({machine}, 8, {.device = DeviceKind::kCuda}).ranks) {
    EXPECT_NE(rank.nic_name, "mlx5_3");
  }
}

TEST_F(Rdma, AddsDevicesUnknownToHwloc) {
  Machine machine = load("one_socket_gpus.xml");
  ASSERT_EQ(machine.nics.size(), 1U);
  const Nic ethernet = machine.nics[0];
  pci("mlx5_0", ethernet.pci, "1");
  port("mlx5_0/ports/1", "4: ACTIVE", "100 Gb/sec (4X EDR)", "Ethernet");
  pci("mlx5_1", "0000:01:00.0", "0");
  port("mlx5_1/ports/1", "4: ACTIVE", "200 Gb/sec (4X HDR)", "InfiniBand");
  port("rxe0/ports/1", "4: ACTIVE", "2.5 Gb/sec (1X SDR)", "Ethernet");  // a software device without a PCI device
  add_rdma(machine, folder_);
  ASSERT_EQ(machine.nics.size(), 3U);
  EXPECT_EQ(machine.nics[0].name, "mlx5_1");
  EXPECT_EQ(machine.nics[0].numa, std::vector<int>{0});
  EXPECT_EQ(machine.nics[1].name, "mlx5_0");
  EXPECT_EQ(machine.nics[1].interface, ethernet.interface) << "two views of one adapter";
  EXPECT_TRUE(machine.nics[1].rdma);
  EXPECT_EQ(machine.nics[2].name, "rxe0");
  EXPECT_EQ(machine.nics[2].numa, (std::vector<int>{0, 1}));
  EXPECT_EQ(machine.nics[2].pci, "");
}

TEST_F(Rdma, WithoutTheFolderTheMachineIsUnchanged) {
  Machine machine = load("one_socket_gpus.xml");
  add_rdma(machine, folder_ + "/none");
  EXPECT_EQ(machine, load("one_socket_gpus.xml"));
}

}  // namespace
}  // namespace annulus::devices_test
