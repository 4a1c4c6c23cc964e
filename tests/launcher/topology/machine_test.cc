// Tests of launcher/topology/machine.h: reading machines from XML files of whole nodes, from made-up and broken XML,
// from synthetic descriptions, and this machine itself.
#include "launcher/topology/machine.h"

#include <gtest/gtest.h>
#include <hwloc.h>
#include <sched.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

#include "common/error.h"
#include "tests/launcher/topology/machine_xml.h"

namespace annulus::machine_test {
namespace {

std::string data(const std::string& name) { return "tests/launcher/topology/testdata/" + name; }

std::string read(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

// The message of the Error(kInput) that `load` must throw.
template <typename Load>
std::string input_error(Load load) {
  try {
    load();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  size_t count = 0;
  for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size(), ++count) {
    text.replace(at, from.size(), to);
  }
  EXPECT_GT(count, 0U) << from;
  return text;
}

TEST(CpuSet, PrintsAndParsesLists) {
  EXPECT_EQ(CpuSet({8, 3, 1, 0, 2, 2}).to_string(), "0-3,8");
  EXPECT_EQ(CpuSet::parse("0-3,8"), CpuSet({0, 1, 2, 3, 8}));
  EXPECT_EQ(CpuSet::parse(""), CpuSet());
  for (const char* bad : {"a", "1-", "3-1", "1,", ",1", "1--2", "-1", "1;2", "65536", "0-99999999999999999999", " 1"}) {
    input_error([&] { CpuSet::parse(bad); });
  }
}

TEST(CpuSet, ContainsSubsets) {
  const CpuSet a({0, 1, 2});
  const CpuSet b({2, 3});
  EXPECT_TRUE(a.contains(CpuSet({1, 2})));
  EXPECT_FALSE(a.contains(b));
}

TEST(Machine, ReadsAnEightGpuNode) {
  const Machine m = Machine::from_xml(data("h200_node.xml"));
  EXPECT_EQ(m.host, "h200-node");
  EXPECT_FALSE(m.is_this_system);
  EXPECT_EQ(m.packages.size(), 2U);
  ASSERT_EQ(m.numa_nodes.size(), 2U);
  EXPECT_EQ(m.numa_nodes[1].memory_bytes, int64_t{1} << 40);
  EXPECT_EQ(m.cores.size(), 16U);
  EXPECT_EQ(m.cpus().to_string(), "0-15");
  ASSERT_EQ(m.gpus.size(), 8U);  // each appears as a CUDA and as an NVML device
  const char* const ids[] = {"0000:11:00.0", "0000:12:00.0", "0000:21:00.0", "0000:22:00.0",
                             "0000:91:00.0", "0000:92:00.0", "0000:a1:00.0", "0000:a2:00.0"};
  for (size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(m.gpus[i].pci, ids[i]);
    EXPECT_EQ(m.gpus[i].model, "NVIDIA H200");
    EXPECT_EQ(m.gpus[i].memory_bytes, int64_t{140} << 30);
    EXPECT_EQ(m.gpus[i].numa, std::vector<int>{static_cast<int>(i / 4)});
    for (size_t j = 0; j < 8; ++j) {
      EXPECT_EQ(m.links[i][j], i == j ? (Link{LinkKind::kSelf, 0}) : (Link{LinkKind::kNvlink, 450000}));
    }
  }
  ASSERT_EQ(m.nics.size(), 4U);  // an RDMA device and its interface are one adapter
  EXPECT_EQ(m.nics[2].name, "mlx5_2");
  EXPECT_EQ(m.nics[2].interface, "ib2");
  EXPECT_TRUE(m.nics[2].rdma);
}

TEST(Machine, WithoutNvlinkLinksComeFromThePciTree) {
  std::string xml = read(data("h200_node.xml"));
  xml.erase(xml.find("<distances2hetero"), xml.find("</topology>") - xml.find("<distances2hetero"));
  const Machine m = Machine::from_xml_text(xml, "x");
  EXPECT_EQ(m.links[0][1], (Link{LinkKind::kPciSwitch, 63015}));
  EXPECT_EQ(m.links[0][2].kind, LinkKind::kPciRoot);
  EXPECT_EQ(m.links[0][4].kind, LinkKind::kSystem);
  EXPECT_GT(m.links[0][2].megabytes_per_s, m.links[0][4].megabytes_per_s);
  // The GPUs of this machine are on separate root ports.
  EXPECT_EQ(Machine::from_xml(data("dgx.xml")).links[0][1].kind, LinkKind::kPackage);
}

TEST(Machine, ReadsGpusOnOneSocketWithPartialNvlink) {
  const Machine m = Machine::from_xml(data("one_socket_gpus.xml"));
  ASSERT_EQ(m.gpus.size(), 4U);  // each appears as a CUDA, an NVML and an OpenCL device
  for (const Gpu& gpu : m.gpus) EXPECT_EQ(gpu.numa, std::vector<int>{0});
  EXPECT_EQ(m.links[0][2], (Link{LinkKind::kNvlink, 300000}));
  EXPECT_EQ(m.links[0][1].kind, LinkKind::kPciRoot);  // a zero in the matrix means no NVLink
  ASSERT_EQ(m.nics.size(), 1U);
  EXPECT_FALSE(m.nics[0].rdma);
}

TEST(Machine, FindsGpusOnThePciBus) {
  const Machine m = Machine::from_xml(data("dgx.xml"));
  ASSERT_EQ(m.gpus.size(), 8U);
  EXPECT_EQ(m.gpus[0].model, "NVIDIA H100 80GB HBM3");  // the name that NVML gives
  EXPECT_EQ(m.cores.size(), 112U);
  EXPECT_EQ(m.cpus().size(), 224);
  EXPECT_EQ(m.cores[0].pus, (std::vector<int>{0, 112}));
  EXPECT_EQ(m.nics.size(), 10U);
  for (const Nic& nic : m.nics) EXPECT_EQ(nic.active, nic.name != "mlx5_5");

  testing::MadeUpMachine bare;
  bare.gpus = {3};
  const Machine made_up = Machine::from_xml_text(testing::to_xml(bare), "dir/made-up.xml");
  ASSERT_EQ(made_up.gpus.size(), 3U);
  EXPECT_EQ(made_up.gpus[0].model, "NVIDIA 10de:2335");
  EXPECT_EQ(made_up.host, "made-up");
}

TEST(Machine, AddsNvlinkBandwidthThroughSwitches) {
  // Two GPUs and two NVSwitches; each GPU has 100 GB/s to the first switch and 50 GB/s to the second.
  testing::MadeUpMachine machine;
  machine.gpus = {2};
  std::string xml = testing::to_xml(machine);
  const std::string switches =
      "<object type=\"PCIDev\" gp_index=\"900\" subtype=\"NVSwitch\" pci_busid=\"0000:f1:00.0\" "
      "pci_type=\"0680 [10de:22a3] [10de:1796] a1\" pci_link_speed=\"4.0\"/>\n"
      "<object type=\"PCIDev\" gp_index=\"901\" subtype=\"NVSwitch\" pci_busid=\"0000:f2:00.0\" "
      "pci_type=\"0680 [10de:22a3] [10de:1796] a1\" pci_link_speed=\"4.0\"/>\n";
  const size_t first_bridge = xml.find("<object type=\"Bridge\"");
  xml.insert(xml.find(">\n", first_bridge) + 2, switches);
  // The gp_index of each GPU.
  std::vector<std::string> gp;
  for (size_t at = 0; (at = xml.find("pci_type=\"0302", at)) != std::string::npos; ++at) {
    const size_t begin = xml.rfind("gp_index=\"", at) + 10;
    gp.push_back(xml.substr(begin, xml.find('"', begin) - begin));
  }
  ASSERT_EQ(gp.size(), 2U);
  const std::string indexes = "PCIDev:" + gp[0] + " PCIDev:" + gp[1] + " PCIDev:900 PCIDev:901";
  const std::string values = "0 0 100000 50000 0 0 100000 50000 100000 100000 0 0 50000 50000 0 0";
  const std::string matrix =
      "<distances2hetero nbobjs=\"4\" kind=\"10\" name=\"NVLinkBandwidth\">\n<indexes length=\"" +
      std::to_string(indexes.size()) + "\">" + indexes + "</indexes>\n<u64values length=\"" +
      std::to_string(values.size()) + "\">" + values + "</u64values>\n</distances2hetero>\n";
  xml.insert(xml.find("</topology>"), matrix);
  const Machine m = Machine::from_xml_text(xml, "x");
  ASSERT_EQ(m.gpus.size(), 2U);
  EXPECT_EQ(m.links[0][1], (Link{LinkKind::kNvlink, 150000}));
}

TEST(Machine, LeavesOutDisallowedProcessors) {
  const std::string xml =
      replaced(read(data("h200_node.xml")), "allowed_cpuset=\"0x0000ffff\"", "allowed_cpuset=\"0x000000f3\"");
  const Machine m = Machine::from_xml_text(xml, "x");
  EXPECT_EQ(m.cpus().to_string(), "0-1,4-7");
  EXPECT_EQ(m.cores.size(), 6U);
  EXPECT_EQ(m.gpus.size(), 8U);
}

TEST(Machine, ReadsSyntheticDescriptions) {
  const Machine m = Machine::from_synthetic("pack:2 [numa] l3:1 core:4 pu:2");
  EXPECT_EQ(m.packages.size(), 2U);
  EXPECT_EQ(m.numa_nodes.size(), 2U);
  EXPECT_EQ(m.cores.size(), 8U);
  EXPECT_EQ(m.cores[0].pus.size(), 2U);
  EXPECT_TRUE(m.gpus.empty());
  EXPECT_FALSE(m.is_this_system);
  for (const char* bad : {"", "nonsense", "pack:2 core:x", "pack:1000 core:1000 pu:1000", "pack:-1 pu:2",
                          "pack:99999999999999999999999 pu:1", "pu:0"}) {
    input_error([&] { Machine::from_synthetic(bad); });
  }
}

TEST(Machine, ProcessorsWithoutCoresCountAsCores) {
  const Machine m = Machine::from_synthetic("[numa] pu:3");
  EXPECT_EQ(m.cores.size(), 3U);
  EXPECT_EQ(m.packages.size(), 1U);
}

TEST(Machine, ReadsThisMachine) {
  const Machine m = Machine::this_machine();
  EXPECT_TRUE(m.is_this_system);
  EXPECT_FALSE(m.host.empty());
  EXPECT_GT(m.memory_bytes(), 0);
  cpu_set_t mask;
  ASSERT_EQ(sched_getaffinity(0, sizeof(mask), &mask), 0);
  std::vector<int> pus;
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    if (CPU_ISSET(i, &mask)) pus.push_back(i);
  }
  EXPECT_EQ(m.cpus(), CpuSet(pus));
}

TEST(Machine, EnvironmentVariablesMayDescribeAnotherMachine) {
  ASSERT_EQ(setenv("HWLOC_XMLFILE", data("h200_node.xml").c_str(), 1), 0);
  const Machine m = Machine::this_machine();
  EXPECT_EQ(m.gpus.size(), 8U);
  EXPECT_FALSE(m.is_this_system);
  // A file or description that is named explicitly takes precedence.
  EXPECT_EQ(Machine::from_xml(data("dgx.xml")).host, "dgx");
  EXPECT_EQ(Machine::from_synthetic("[numa] pu:3").cores.size(), 3U);
  ASSERT_EQ(setenv("HWLOC_XMLFILE", "nowhere.xml", 1), 0);
  EXPECT_NE(input_error([] { Machine::this_machine(); }).find("nowhere.xml"), std::string::npos);
  ASSERT_EQ(unsetenv("HWLOC_XMLFILE"), 0);
  ASSERT_EQ(setenv("HWLOC_SYNTHETIC", "[numa] pu:3", 1), 0);
  EXPECT_EQ(Machine::this_machine().cores.size(), 3U);
  ASSERT_EQ(unsetenv("HWLOC_SYNTHETIC"), 0);
}

TEST(MachineXml, RefusesMissingOrEmptyFilesAndFolders) {
  EXPECT_NE(input_error([] { Machine::from_xml("no/such.xml"); }).find("no/such.xml cannot be read: No such file"),
            std::string::npos);
  EXPECT_NE(input_error([] { Machine::from_xml("tests"); }).find("tests cannot be read: Is a directory"),
            std::string::npos);
  const std::string empty = ::testing::TempDir() + "/empty.xml";
  std::ofstream(empty).close();
  EXPECT_NE(input_error([&] { Machine::from_xml(empty); }).find(empty), std::string::npos);
}

TEST(MachineXml, RefusesMalformedOrContradictoryXml) {
  const std::string whole = read(data("h200_node.xml"));
  std::vector<std::string> bad = {"",
                                  "hello",
                                  std::string("\0\0\0\0", 4),
                                  "<?xml version=\"1.0\"?><other/>",
                                  "<?xml version=\"1.0\"?>\n<topology version=\"2.0\"></topology>",
                                  replaced(whole, "type=\"PU\"", "type=\"Misc\""),
                                  replaced(whole, "cpuset=\"0x", "cpuset=\"0xf...f,0x"),
                                  replaced(whole, "os_index=\"9\"", "os_index=\"8\"")};
  for (size_t cut = 1; cut < whole.size() - 20; cut += whole.size() / 23) bad.push_back(whole.substr(0, cut));
  for (const std::string& text : bad) {
    const std::string message = input_error([&] { Machine::from_xml_text(text, "here.xml"); });
    EXPECT_NE(message.find("here.xml"), std::string::npos) << message << "\n" << text.substr(0, 400);
  }
}

TEST(MachineXml, NamesTheFormatOfANewerHwloc) {
  const unsigned newer = (hwloc_get_api_version() >> 16) + 1;
  const std::string mark = "<topology version=\"" + std::to_string(newer) + ".0\">";
  const std::string text = replaced(read(data("h200_node.xml")), "<topology version=\"2.0\">", mark);
  const std::string message = input_error([&] { Machine::from_xml_text(text, "here.xml"); });
  EXPECT_NE(message.find("here.xml: it is in the format of hwloc " + std::to_string(newer)), std::string::npos)
      << message;
  EXPECT_NE(message.find("`lstopo --export-xml-flags v" + std::to_string(newer - 1) + " machine.xml`"),
            std::string::npos)
      << message;
}

TEST(MachineXml, XmlThatCrashesHwlocIsAnError) {
  // A core lacks the attributes that list its processors; hwloc would dereference a null pointer.
  const std::string text =
      replaced(read(data("h200_node.xml")),
               "<object type=\"Core\" os_index=\"1\" cpuset=\"0x00000002\" complete_cpuset=\"0x00000002\"",
               "<object type=\"Core\" os_index=\"1\"");
  input_error([&] { Machine::from_xml_text(text, "here.xml"); });
}

TEST(Machine, RestrictsToVisibleGpus) {
  Machine m = Machine::from_xml(data("one_socket_gpus.xml"));
  m.set_visible_gpus({"00000000:51:00.0", "0000:21:00.0", "99:00.0"});
  ASSERT_EQ(m.gpus.size(), 3U);
  EXPECT_EQ(m.gpus[0].pci, "0000:21:00.0");
  EXPECT_EQ(m.gpus[1].pci, "0000:51:00.0");
  EXPECT_EQ(m.gpus[2].pci, "0000:99:00.0");
  EXPECT_EQ(m.links[0][1], (Link{LinkKind::kNvlink, 300000}));
  EXPECT_EQ(m.links[0][2].kind, LinkKind::kSystem);
  EXPECT_EQ(m.gpus[2].numa, (std::vector<int>{0, 1}));
  for (const char* bad : {"", "0", "gpu0", "0000:21", "0000:21:00", "0000:21:00.8", "0000:21:20.0", "0:0:0:0",
                          "0000:21:00.0x", "0000:100:00.0", "-1:21:00.0", "21:00.0.0"}) {
    input_error([&] { m.set_visible_gpus({bad}); });
  }
  EXPECT_EQ(normalize_pci_bus_id("00000000:1B:00.0"), "0000:1b:00.0");
  EXPECT_EQ(normalize_pci_bus_id("1b:00.1"), "0000:1b:00.1");
}

TEST(Machine, AppliesCudaVisibleDevices) {
  const Machine all = Machine::from_xml(data("one_socket_gpus.xml"));
  ASSERT_GE(all.gpus.size(), 3U);
  const auto left = [&](std::string_view visible) {
    Machine m = all;
    m.hide_gpus_from_cuda(visible);
    std::vector<std::string> ids;
    for (const Gpu& gpu : m.gpus) ids.push_back(gpu.pci);
    return ids;
  };
  std::vector<std::string> everything;
  for (const Gpu& gpu : all.gpus) everything.push_back(gpu.pci);
  EXPECT_EQ(left("2,0"), (std::vector<std::string>{everything[0], everything[2]}));
  EXPECT_EQ(left("1"), std::vector<std::string>{everything[1]});
  EXPECT_EQ(left("0,99,1"), std::vector<std::string>{everything[0]}) << "an invalid entry ends the list";
  EXPECT_TRUE(left("").empty());
  EXPECT_TRUE(left("-1").empty());
  for (const char* other : {"GPU-8932f937", "MIG-GPU-1", "0,GPU-1", "zero", "0;1"}) EXPECT_EQ(left(other), everything);

  Machine mixed = all;
  mixed.gpus[1].model = "another";
  mixed.hide_gpus_from_cuda("0");
  EXPECT_EQ(mixed.gpus.size(), all.gpus.size()) << "with different models CUDA may number them by speed";
}

}  // namespace
}  // namespace annulus::machine_test
