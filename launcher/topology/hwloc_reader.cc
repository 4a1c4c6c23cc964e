// See hwloc_reader.h.
#include "launcher/topology/hwloc_reader.h"

#include <hwloc.h>
#include <hwloc/distances.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "common/error.h"
#include "common/text.h"

namespace annulus {
namespace {

constexpr unsigned kNvidia = 0x10de;
constexpr uint64_t kMaxBandwidth = uint64_t{1} << 40;  // per second; larger values are not plausible bandwidths

std::vector<int> bits(hwloc_const_bitmap_t bitmap, int max) {
  std::vector<int> out;
  if (bitmap == nullptr || hwloc_bitmap_weight(bitmap) < 0) return out;  // null or infinite
  for (int i = hwloc_bitmap_first(bitmap); i >= 0 && i <= max; i = hwloc_bitmap_next(bitmap, i)) out.push_back(i);
  return out;
}

std::string info(hwloc_obj_t object, const char* name) {
  const char* value = object == nullptr ? nullptr : hwloc_obj_get_info_by_name(object, name);
  return value == nullptr ? "" : value;
}

bool has_subtype(hwloc_obj_t object, const char* subtype) {
  return object->subtype != nullptr && std::strcmp(object->subtype, subtype) == 0;
}

hwloc_obj_t pci_device_above(hwloc_obj_t object) {
  while (object != nullptr && object->type != HWLOC_OBJ_PCI_DEVICE) object = object->parent;
  return object;
}

std::string pci_id(const hwloc_obj_attr_u::hwloc_pcidev_attr_s& pci) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%04x:%02x:%02x.%x", static_cast<unsigned>(pci.domain),
                static_cast<unsigned>(pci.bus), static_cast<unsigned>(pci.dev), static_cast<unsigned>(pci.func));
  return text.data();
}

// Returns the bridges above a device, host bridge first, by hwloc's logical index among bridges, which is unique within
// the machine.
PciPath bridges_above(hwloc_obj_t object) {
  PciPath path;
  for (hwloc_obj_t o = object->parent; o != nullptr; o = o->parent) {
    if (o->type == HWLOC_OBJ_BRIDGE) path.push_back(static_cast<int64_t>(o->logical_index));
  }
  std::reverse(path.begin(), path.end());
  return path;
}

// Turns a loaded hwloc topology into a Machine. `source` names it in errors.
class Reader {
 public:
  Reader(hwloc_topology_t topology, std::string source, std::optional<CpuSet> only)
      : topology_(topology), source_(std::move(source)), only_(std::move(only)) {}

  Machine read() {
    machine_.is_this_system = hwloc_topology_is_thissystem(topology_) != 0;
    machine_.host = info(hwloc_get_root_obj(topology_), "HostName");
    read_packages();
    read_numa_nodes();
    read_cores();
    read_gpus();
    read_nics();
    read_links();
    return std::move(machine_);
  }

 private:
  [[noreturn]] void fail(const std::string& why) const {
    throw Error(ErrorKind::kInput, "topology", source_ + ": " + why);
  }

  bool allowed(int pu) const { return !only_ || only_->contains(pu); }

  void read_packages() {
    for (hwloc_obj_t o = nullptr; (o = hwloc_get_next_obj_by_type(topology_, HWLOC_OBJ_PACKAGE, o)) != nullptr;) {
      package_of_gp_[o->gp_index] = static_cast<int>(machine_.packages.size());
      machine_.packages.push_back({static_cast<int>(o->os_index), info(o, "CPUModel"), {}});
    }
    std::set<int> ids;
    for (const Package& package : machine_.packages) ids.insert(package.id);
    if (ids.size() < machine_.packages.size() ||
        (!ids.empty() && *ids.begin() < 0)) {  // the system does not number packages
      for (size_t i = 0; i < machine_.packages.size(); ++i) machine_.packages[i].id = static_cast<int>(i);
    }
    if (machine_.packages.empty()) {  // some virtual machines show none
      machine_.packages.push_back({0, info(hwloc_get_root_obj(topology_), "CPUModel"), {}});
    }
  }

  int package_of(hwloc_obj_t object) const {
    hwloc_obj_t above = hwloc_get_ancestor_obj_by_type(topology_, HWLOC_OBJ_PACKAGE, object);
    if (above == nullptr &&
        object->cpuset != nullptr) {  // a NUMA node of several packages counts to that of its first processor
      hwloc_obj_t pu = hwloc_get_pu_obj_by_os_index(
          topology_, static_cast<unsigned>(std::max(0, hwloc_bitmap_first(object->cpuset))));
      if (pu != nullptr) above = hwloc_get_ancestor_obj_by_type(topology_, HWLOC_OBJ_PACKAGE, pu);
    }
    const auto found = above == nullptr ? package_of_gp_.end() : package_of_gp_.find(above->gp_index);
    return found == package_of_gp_.end() ? 0 : found->second;
  }

  void read_numa_nodes() {
    const int count = hwloc_get_nbobjs_by_type(topology_, HWLOC_OBJ_NUMANODE);
    if (count < 1) fail("it describes no memory (no NUMANode object)");
    if (count > kMaxNumaNodes)
      fail("it describes " + std::to_string(count) + " NUMA nodes; at most 4096 are supported");
    std::set<int> gpu_memory;
    for (hwloc_obj_t o = nullptr; (o = hwloc_get_next_obj_by_type(topology_, HWLOC_OBJ_NUMANODE, o)) != nullptr;) {
      if (o->os_index > static_cast<unsigned>(CpuSet::kMaxPu)) fail("a NUMA node has no usable number (os_index)");
      const uint64_t bytes = o->attr == nullptr ? 0 : o->attr->numanode.local_memory;
      machine_.numa_nodes.push_back({static_cast<int>(o->os_index),
                                     package_of(o),
                                     static_cast<int64_t>(std::min<uint64_t>(bytes, int64_t{1} << 60)),
                                     {}});
      // On Grace, a GPU's memory is a NUMA node of the host, on which no rank's host memory should lie.
      if (has_subtype(o, "GPUMemory")) gpu_memory.insert(static_cast<int>(o->os_index));
    }
    auto& nodes = machine_.numa_nodes;
    std::sort(nodes.begin(), nodes.end(), [](const NumaNode& a, const NumaNode& b) {
      return std::pair(a.package, a.id) < std::pair(b.package, b.id);
    });
    for (size_t i = 0; i < nodes.size(); ++i) {
      if (!numa_index_.emplace(nodes[i].id, static_cast<int>(i)).second) {
        fail("two NUMA nodes have the number " + std::to_string(nodes[i].id));
      }
      if (!gpu_memory.contains(nodes[i].id)) host_memory_.insert(nodes[i].id);
    }
  }

  // Returns the indices of the nodes in a nodeset without those that are a GPU's memory.
  std::vector<int> numa_of(hwloc_const_bitmap_t nodeset) const {
    std::vector<int> out;
    for (int id : bits(nodeset, CpuSet::kMaxPu)) {
      if (host_memory_.contains(id)) out.push_back(numa_index_.at(id));
    }
    return out;
  }

  int numa_of_core(hwloc_obj_t core, int package) const {
    const std::vector<int> near = numa_of(core->nodeset);
    if (!near.empty()) {
      // Ordinary memory comes before high-bandwidth memory in the system's numbering.
      return *std::min_element(near.begin(), near.end(),
                               [&](int a, int b) { return machine_.numa_nodes[a].id < machine_.numa_nodes[b].id; });
    }
    // This process may not use the core's own node, so take another one of the package, else the first.
    for (size_t i = 0; i < machine_.numa_nodes.size(); ++i) {
      if (machine_.numa_nodes[i].package == package) return static_cast<int>(i);
    }
    return 0;
  }

  void add_core(hwloc_obj_t object) {
    Core core;
    for (int pu : bits(object->cpuset, CpuSet::kMaxPu)) {
      if (!allowed(pu)) continue;
      if (!pus_.insert(pu).second) fail("processor " + std::to_string(pu) + " belongs to two cores");
      core.pus.push_back(pu);
    }
    if (core.pus.empty()) return;
    core.package = package_of(object);
    core.numa = numa_of_core(object, core.package);
    machine_.cores.push_back(std::move(core));
  }

  void read_cores() {
    const int pus = hwloc_get_nbobjs_by_type(topology_, HWLOC_OBJ_PU);
    if (pus < 1) fail("it describes no processors (no PU object)");
    if (pus > CpuSet::kMaxPu) fail("it describes " + std::to_string(pus) + " processors; at most 65535 are supported");
    for (hwloc_obj_t o = nullptr; (o = hwloc_get_next_obj_by_type(topology_, HWLOC_OBJ_PU, o)) != nullptr;) {
      if (o->os_index > static_cast<unsigned>(CpuSet::kMaxPu) || hwloc_bitmap_weight(o->cpuset) != 1 ||
          !hwloc_bitmap_isset(o->cpuset, o->os_index)) {
        fail("a processor's number (os_index " + std::to_string(o->os_index) + ") is not the one in its cpuset");
      }
      hwloc_obj_t core = hwloc_get_ancestor_obj_by_type(topology_, HWLOC_OBJ_CORE, o);
      if (core == nullptr) {
        add_core(o);  // virtual machines may show processors without cores; each then counts as a core
      } else if (core->logical_index != last_core_) {
        last_core_ = core->logical_index;
        add_core(core);
      }
    }
    if (machine_.cores.empty()) fail("it has no processor that this process may use");
    std::stable_sort(machine_.cores.begin(), machine_.cores.end(),
                     [](const Core& a, const Core& b) { return a.numa < b.numa; });
    machine_.set_cpus();
  }

  // Returns the nodes near a device: those of the first object above it that is neither a bridge nor a device.
  std::vector<int> numa_near(hwloc_obj_t device) const {
    hwloc_obj_t host = hwloc_get_non_io_ancestor_obj(topology_, device);
    std::vector<int> near = numa_of(host == nullptr ? nullptr : host->nodeset);
    if (near.empty()) {
      for (int id : host_memory_) near.push_back(numa_index_.at(id));
    }
    std::sort(near.begin(), near.end());
    return near;
  }

  void read_gpus() {
    // A GPU may appear as several OS devices (cuda0, nvml0, opencl0d0), so its PCI device is counted. If the topology
    // has CUDA devices, only those count as GPUs; otherwise every NVIDIA display or 3D controller does.
    std::map<std::string, hwloc_obj_t> found;
    for (hwloc_obj_t o = nullptr; (o = hwloc_get_next_osdev(topology_, o)) != nullptr;) {
      if (o->attr->osdev.type != HWLOC_OBJ_OSDEV_COPROC || !has_subtype(o, "CUDA")) continue;
      if (hwloc_obj_t pci = pci_device_above(o)) found.emplace(pci_id(pci->attr->pcidev), pci);
    }
    if (found.empty()) {
      for (hwloc_obj_t o = nullptr; (o = hwloc_get_next_pcidev(topology_, o)) != nullptr;) {
        const auto& pci = o->attr->pcidev;
        const bool display = pci.class_id == 0x0300 || pci.class_id == 0x0302;
        if (display && pci.vendor_id == kNvidia) found.emplace(pci_id(pci), o);
      }
    }
    if (found.size() > kMaxGpus)
      fail("it describes " + std::to_string(found.size()) + " GPUs; at most 1024 are supported");
    for (const auto& [id, object] : found) {
      Gpu gpu;
      gpu.pci = id;
      for (hwloc_obj_t child = object->io_first_child; child != nullptr; child = child->next_sibling) {
        if (gpu.model.empty()) gpu.model = info(child, "GPUModel");
        const auto kib = leading_number<int64_t>(info(child, "CUDAGlobalMemorySize"));
        if (kib > 0 && kib < (int64_t{1} << 40)) gpu.memory_bytes = kib * 1024;
      }
      if (gpu.model.empty()) gpu.model = info(object, "PCIDevice");
      if (gpu.model.empty()) {
        std::array<char, 32> text{};
        std::snprintf(text.data(), text.size(), "NVIDIA %04x:%04x",
                      static_cast<unsigned>(object->attr->pcidev.vendor_id),
                      static_cast<unsigned>(object->attr->pcidev.device_id));
        gpu.model = text.data();
      }
      const double speed = static_cast<double>(object->attr->pcidev.linkspeed);
      if (std::isfinite(speed) && speed > 0 && speed < 1e6) gpu.pci_gigabytes_per_s = speed;
      gpu.numa = numa_near(object);
      gpu.path = bridges_above(object);
      gpu_of_gp_[object->gp_index] = machine_.gpus.size();
      machine_.gpus.push_back(std::move(gpu));
    }
  }

  // Returns the ports that hwloc states. It gives only their state, as "Port1State".
  static std::vector<RdmaPort> ports_of(hwloc_obj_t rdma) {
    std::map<int, RdmaPort> ports;
    for (unsigned i = 0; i < rdma->infos_count; ++i) {
      std::string_view name = rdma->infos[i].name;
      if (!name.starts_with("Port") || !name.ends_with("State")) continue;
      RdmaPort port;
      port.number = leading_number<int>(name.substr(4));
      if (port.number < 1 || port.number > kMaxRdmaPorts) continue;
      port.active = std::string_view(rdma->infos[i].value) == "4";  // IBV_PORT_ACTIVE
      ports.emplace(port.number, port);
    }
    std::vector<RdmaPort> list;
    for (const auto& [number, port] : ports) list.push_back(port);
    return list;
  }

  void read_nics() {
    std::map<std::string, Nic> found;
    for (hwloc_obj_t o = nullptr; (o = hwloc_get_next_osdev(topology_, o)) != nullptr;) {
      const bool rdma = o->attr->osdev.type == HWLOC_OBJ_OSDEV_OPENFABRICS;
      if ((!rdma && o->attr->osdev.type != HWLOC_OBJ_OSDEV_NETWORK) || o->name == nullptr) continue;
      hwloc_obj_t pci = pci_device_above(o);
      // An RDMA device and its network interface are two views of one adapter.
      Nic& nic = found[pci == nullptr ? std::string("~") + o->name : pci_id(pci->attr->pcidev)];
      if (nic.numa.empty()) {
        nic.pci = pci == nullptr ? "" : pci_id(pci->attr->pcidev);
        nic.numa = numa_near(o);
        nic.path = bridges_above(o);
      }
      if (rdma && !nic.rdma) {
        nic.rdma = true;
        nic.name = o->name;
        nic.set_ports(ports_of(o));
      } else if (!rdma && nic.interface.empty()) {
        nic.interface = o->name;
      }
      if (found.size() > kMaxNics) fail("it describes more than 4096 network adapters, the most that are supported");
    }
    for (auto& [id, nic] : found) {
      if (nic.name.empty()) nic.name = nic.interface;
      machine_.nics.push_back(std::move(nic));
    }
  }

  void read_links() {
    derive_links(machine_);
    unsigned count = 1;
    hwloc_distances_s* distances = nullptr;
    if (hwloc_distances_get_by_name(topology_, "NVLinkBandwidth", &count, &distances, 0) != 0 || count == 0 ||
        distances == nullptr) {
      return;
    }
    // With NVSwitches the matrix has a row for every port of every switch; this call merges the ports of a switch into
    // one object. It fails if there is no switch, which is fine. hwloc's own closure over switches is not used, because
    // it would set all direct links to zero.
    hwloc_distances_transform(topology_, distances, HWLOC_DISTANCES_TRANSFORM_MERGE_SWITCH_PORTS, nullptr, 0);
    const size_t n = distances->nbobjs;
    const auto at = [&](size_t i, size_t j) {
      // A ring sends in one direction, which is not known yet, so the slower of the two counts.
      const uint64_t value = std::min(distances->values[i * n + j], distances->values[j * n + i]);
      return value > kMaxBandwidth ? uint64_t{0} : value;
    };
    std::vector<size_t> gpu(n, kMaxGpus);
    std::vector<size_t> switches;
    for (size_t i = 0; i < n; ++i) {
      if (distances->objs[i] == nullptr) continue;
      hwloc_obj_t pci = pci_device_above(distances->objs[i]);
      const auto it = pci == nullptr ? gpu_of_gp_.end() : gpu_of_gp_.find(pci->gp_index);
      if (it != gpu_of_gp_.end()) {
        gpu[i] = it->second;
      } else if (has_subtype(distances->objs[i], "NVSwitch")) {
        switches.push_back(i);
      }
    }
    for (size_t i = 0; i < n && n <= kMaxGpus; ++i) {
      for (size_t j = 0; j < n; ++j) {
        if (gpu[i] == kMaxGpus || gpu[j] == kMaxGpus || gpu[i] == gpu[j]) continue;
        uint64_t value = at(i, j);
        for (size_t s : switches) value = std::min(kMaxBandwidth, value + std::min(at(i, s), at(s, j)));
        if (value == 0) continue;  // no NVLink between these two: the link that the PCI tree gives stays
        machine_.links[gpu[i]][gpu[j]] = {LinkKind::kNvlink, static_cast<int64_t>(value)};
      }
    }
    machine_.nvswitches = static_cast<int>(std::min(switches.size(), kMaxNvswitches));
    hwloc_distances_release(topology_, distances);
  }

  hwloc_topology_t topology_;
  std::string source_;
  std::optional<CpuSet> only_;
  Machine machine_;
  std::map<uint64_t, int> package_of_gp_;
  std::map<uint64_t, size_t> gpu_of_gp_;
  std::map<int, int> numa_index_;  // system's number -> index
  std::set<int> host_memory_;      // system's numbers of nodes that are not a GPU's memory
  std::set<int> pus_;
  unsigned last_core_ = std::numeric_limits<unsigned>::max();
};

}  // namespace

void HwlocTopologyDeleter::operator()(hwloc_topology* topology) const { hwloc_topology_destroy(topology); }

HwlocTopology init_hwloc() {
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) {
    throw Error(ErrorKind::kResource, "topology", "hwloc could not be initialized, probably for lack of memory");
  }
  HwlocTopology topology(raw);
  // By default hwloc leaves devices out; the filter must be set before the topology is loaded.
  hwloc_topology_set_io_types_filter(raw, HWLOC_TYPE_FILTER_KEEP_IMPORTANT);
  // These components would load drivers, which start threads before this process is bound. GPUs are found on the PCI
  // bus and through NVML instead; add_nvml removes those that this process cannot use.
  for (const char* component : {"cuda", "opencl", "gl", "levelzero", "rsmi"}) {
    hwloc_topology_set_components(raw, HWLOC_TOPOLOGY_COMPONENTS_FLAG_BLACKLIST, component);
  }
  return topology;
}

Machine read_machine(hwloc_topology* topology, const std::string& source, std::optional<CpuSet> only) {
  return Reader(topology, source, std::move(only)).read();
}

}  // namespace annulus
