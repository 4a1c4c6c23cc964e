// Machine: a description of one host as plain data: packages, NUMA nodes, cores, GPUs, NICs, and how close the GPUs are
// to one another. `place` makes a Placement from it, and the verb `topology` prints it. Nothing here needs the hardware
// that it describes, so a node of 8 GPUs can be planned for on a laptop.
//
// hwloc provides the description: of this machine, from an XML file that `lstopo file.xml` wrote on another, or from a
// synthetic description. Thread safety: plain data; loading this machine only reads from the kernel.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "launcher/topology/cpu_set.h"

namespace annulus {

// Limits beyond what any machine has; descriptions that exceed them are refused.
constexpr size_t kMaxGpus = 1024;  // the link matrix is its square
constexpr size_t kMaxNics = 4096;
constexpr size_t kMaxNvswitches = 1024;
constexpr int kMaxNumaNodes = 4096;
constexpr int kMaxRdmaPorts = 255;

struct Package {
  int id = 0;  // as the operating system numbers it
  std::string model;
  CpuSet cpus;
  bool operator==(const Package&) const = default;
};

struct NumaNode {
  int id = 0;       // as the operating system numbers it (what numactl and mbind take)
  int package = 0;  // index into Machine::packages
  int64_t memory_bytes = 0;
  CpuSet cpus;  // of the cores for which this node is the first memory; empty for a node without cores
  bool operator==(const NumaNode&) const = default;
};

struct Core {
  int package = 0;       // index into Machine::packages
  int numa = 0;          // index into Machine::numa_nodes
  std::vector<int> pus;  // its hardware threads, ascending, never empty
  bool operator==(const Core&) const = default;
};

// Where a device is attached: the bridges above it, host bridge first, each by a number that is unique within the
// machine.
using PciPath = std::vector<int64_t>;

struct Gpu {
  std::string pci;                 // "0000:1b:00.0", lower case
  std::string model;               // "NVIDIA H200", or "NVIDIA 10de:2335" if only the PCI ids are known
  int64_t memory_bytes = 0;        // 0: unknown
  double pci_gigabytes_per_s = 0;  // of its PCI link; 0: unknown
  std::vector<int> numa;           // nodes near it, indices into Machine::numa_nodes; all of them when nothing is known
  PciPath path;
  bool operator==(const Gpu&) const = default;
};

// A port of an RDMA device.
struct RdmaPort {
  int number = 1;
  bool active = false;
  bool ethernet = false;       // RoCE; otherwise InfiniBand
  int64_t megabits_per_s = 0;  // 0: unknown
  bool operator==(const RdmaPort&) const = default;
};

struct Nic {
  std::string name;       // "mlx5_0" for an RDMA device, otherwise the network interface
  std::string interface;  // "ib0", "eth0"; empty when there is none
  std::string pci;
  bool rdma = false;
  bool active = true;           // false if the ports are known and none of them is up
  int port = 0;                 // of an RDMA device: the first port that is up; 0: unknown
  std::vector<RdmaPort> ports;  // of an RDMA device, by number; empty if they are not known
  std::vector<int> numa;
  PciPath path;
  bool operator==(const Nic&) const = default;

  // Sets the ports, and `active` and `port` from them.
  void set_ports(std::vector<RdmaPort> ports);
};

// How two GPUs of a host reach each other, best first.
enum class LinkKind { kSelf, kNvlink, kPciSwitch, kPciRoot, kPackage, kSystem };
std::string_view to_string(LinkKind kind);  // "self", "NVLink", "PCI switch", "PCI root", "socket", "system"

struct Link {
  LinkKind kind = LinkKind::kSystem;
  // For NVLink, the speed that hwloc or the driver states. For other kinds, an estimate: the fastest PCI link of any
  // GPU of the host (32 GB/s if none is stated; the links of a pair itself would mislead, because idle GPUs reduce
  // their speed), times 1, 3/4, 1/2 or 1/4 for switch, root, package and system. Such a figure is not a measurement and
  // only serves to rank links.
  int64_t megabytes_per_s = 0;
  bool operator==(const Link&) const = default;
};

struct Machine {
  std::string host;
  bool is_this_system = false;           // read from the running kernel, so that a process can be bound to it
  std::vector<Package> packages;         // never empty; by id
  std::vector<NumaNode> numa_nodes;      // never empty; by (package, id)
  std::vector<Core> cores;               // never empty; by NUMA node, then in the machine's order; allowed PUs only
  std::vector<Gpu> gpus;                 // by PCI bus id, each GPU once
  std::vector<Nic> nics;                 // by PCI bus id
  std::vector<std::vector<Link>> links;  // [gpu][gpu], symmetric
  int nvswitches = 0;                    // NVSwitches that these GPUs' NVLinks lead to; 0: none, or not known
  // How many processors' time the processes of this process's control group get together (common/control_groups/),
  // such as 1.5 in a container; 0: no less than that of all processors that it may use.
  double cpu_quota = 0;

  bool operator==(const Machine&) const = default;

  CpuSet cpus() const;  // all allowed PUs
  int64_t memory_bytes() const;

  // Describes the machine that this process runs on, restricted to the processors that it may use: those of its cgroup
  // and, with `respect_affinity`, those of its current affinity mask (taskset). Pass false in a rank that mpirun or
  // srun has already bound: its mask is then its own share, not the processors that all ranks of the host divide.
  // HWLOC_XMLFILE and HWLOC_SYNTHETIC are honoured as in every program that uses hwloc; the result then has
  // is_this_system = false. Errors: kUnavailable.
  static Machine this_machine(bool respect_affinity = true);

  // Reads a file written by lstopo, in a format of this hwloc or an older one (hwloc 2 reads 1.x and 2.x). The file is
  // not trusted: one that is missing, larger than 64 MiB, not XML, truncated, in a newer format, without processors or
  // inconsistent raises Error(kInput), which names it. hwloc crashes on some inconsistent files, so a forked child
  // reads the file first; call this before MPI is initialised.
  static Machine from_xml(const std::string& path);
  // The same from text. `source` stands for the file's name in messages, and for the host's name if the text has none.
  static Machine from_xml_text(std::string_view xml, const std::string& source);

  // Reads hwloc's synthetic description, "pack:2 [numa] l3:1 core:4 pu:2". It has no devices. Errors: kInput.
  static Machine from_synthetic(const std::string& description, const std::string& host = "synthetic");

  // Keeps the GPUs named, adds those that hwloc did not see (near every node), and orders them by PCI bus id. nvml.cc
  // passes the ids that the driver shows to this process, because in a container the PCI bus also shows GPUs that the
  // process cannot open; launcher/launch/rank_place.cc passes those that CUDA shows. Any spelling of an id is accepted
  // ("00000000:1B:00.0"). Errors: kInput for an id that is not a PCI bus id, or for more than 1,024 GPUs.
  void set_visible_gpus(const std::vector<std::string>& pci_bus_ids);

  // Removes the RDMA devices that are not named ("mlx5_0" or "mlx5_0:1"); a named port becomes the one to use.
  void keep_hcas(const std::vector<std::string>& hcas);

  // Removes the GPUs that CUDA would hide according to a value of CUDA_VISIBLE_DEVICES, without calling CUDA. This
  // works if the value is a list of numbers and all GPUs are of one model, so that CUDA numbers them by PCI bus id. As
  // in CUDA, the list ends before the first number that names no GPU. Any other list (UUIDs, MIG) changes nothing.
  void hide_gpus_from_cuda(std::string_view visible_devices);
};

// "00000000:1B:00.0", "0000:1b:00.0", "1b:00.0" -> "0000:1b:00.0". Errors: kInput.
std::string normalize_pci_bus_id(std::string_view id);

// Returns how close two devices of one host are, judged only by the PCI tree and the packages (never kNvlink).
LinkKind pci_distance(const Machine& machine, const PciPath& a_path, const std::vector<int>& a_numa,
                      const PciPath& b_path, const std::vector<int>& b_numa);

}  // namespace annulus
