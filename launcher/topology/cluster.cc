// See cluster.h.
#include "launcher/topology/cluster.h"

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <utility>

#include "common/checked_json.h"
#include "common/error.h"
#include "common/files.h"
#include "common/text.h"

namespace annulus {
namespace {

constexpr const char* kFormat = "annulus cluster";
constexpr int kVersion = 1;
constexpr size_t kMaxBytes = size_t{64} << 20;
constexpr size_t kMaxHosts = 65536;
constexpr size_t kMaxInterfaces = 4096;
constexpr size_t kMaxAddresses = 4096;
constexpr size_t kMaxBridges = 256;  // above a device
constexpr size_t kMaxPackages = 4096;
constexpr int64_t kMaxMegabytes = int64_t{1} << 40;
constexpr int64_t kMaxMemory = int64_t{1} << 60;

constexpr std::array kLinkKinds = {LinkKind::kSelf,    LinkKind::kNvlink,  LinkKind::kPciSwitch,
                                   LinkKind::kPciRoot, LinkKind::kPackage, LinkKind::kSystem};

nlohmann::json ports_to_json(const std::vector<RdmaPort>& ports) {
  nlohmann::json list = nlohmann::json::array();
  for (const RdmaPort& port : ports) {
    list.push_back({{"number", port.number},
                    {"active", port.active},
                    {"ethernet", port.ethernet},
                    {"megabits_per_s", port.megabits_per_s}});
  }
  return list;
}

void put_devices(const Machine& machine, nlohmann::json& out) {
  const auto ids = [&](const std::vector<int>& indices) {
    nlohmann::json list = nlohmann::json::array();
    for (int i : indices) list.push_back(machine.numa_nodes[i].id);
    return list;
  };
  out["gpus"] = nlohmann::json::array();
  for (const Gpu& gpu : machine.gpus) {
    out["gpus"].push_back({{"pci", gpu.pci},
                           {"model", printable(gpu.model)},
                           {"memory_bytes", gpu.memory_bytes},
                           {"pci_gigabytes_per_s", gpu.pci_gigabytes_per_s},
                           {"numa", ids(gpu.numa)},
                           {"bridges", gpu.path}});
  }
  out["nics"] = nlohmann::json::array();
  for (const Nic& nic : machine.nics) {
    out["nics"].push_back({{"name", printable(nic.name)},
                           {"interface", printable(nic.interface)},
                           {"pci", nic.pci},
                           {"rdma", nic.rdma},
                           {"active", nic.active},
                           {"port", nic.port},
                           {"ports", ports_to_json(nic.ports)},
                           {"numa", ids(nic.numa)},
                           {"bridges", nic.path}});
  }
  out["links"] = nlohmann::json::array();
  for (const auto& row : machine.links) {
    nlohmann::json list = nlohmann::json::array();
    for (const Link& link : row) {
      list.push_back({{"kind", to_string(link.kind)}, {"megabytes_per_s", link.megabytes_per_s}});
    }
    out["links"].push_back(std::move(list));
  }
  out["nvswitches"] = machine.nvswitches;
}

int integer(const CheckedJson& json, int64_t least, int64_t most) {
  return static_cast<int>(json.integer(least, most));
}

// Reads a Machine and checks what other code relies on: indices exist, each processor belongs to one core, and links
// are symmetric.
class MachineReader {
 public:
  explicit MachineReader(const CheckedJson& json) : json_(json) {}

  Machine read() {
    machine_.host = json_.at("host").text();
    read_packages();
    read_numa_nodes();
    read_cores();
    read_gpus();
    read_nics();
    read_links();
    machine_.nvswitches = integer(json_.at("nvswitches"), 0, kMaxNvswitches);
    if (json_.has("cpu_quota")) machine_.cpu_quota = json_.at("cpu_quota").number(0, CpuSet::kMaxPu);
    return std::move(machine_);
  }

 private:
  // Returns the index of the object whose id is `json`.
  static int known(const std::map<int, int>& index_of_id, const CheckedJson& json, const char* what) {
    const auto found = index_of_id.find(integer(json, 0, INT32_MAX));
    if (found == index_of_id.end()) json.refuse(std::string("the id of ") + what + " of this host");
    return found->second;
  }

  void read_packages() {
    for (const CheckedJson& item : json_.at("packages").list(kMaxPackages)) {
      const int id = integer(item.at("id"), 0, INT32_MAX);
      if (!package_of_id_.emplace(id, static_cast<int>(machine_.packages.size())).second) {
        item.at("id").refuse("an id that no other package has");
      }
      machine_.packages.push_back({id, item.at("model").text(), {}});
    }
    if (machine_.packages.empty()) json_.at("packages").refuse("at least one package");
  }

  void read_numa_nodes() {
    for (const CheckedJson& item : json_.at("numa_nodes").list(kMaxNumaNodes)) {
      const int id = integer(item.at("id"), 0, CpuSet::kMaxPu);
      if (!numa_of_id_.emplace(id, static_cast<int>(machine_.numa_nodes.size())).second) {
        item.at("id").refuse("an id that no other NUMA node has");
      }
      machine_.numa_nodes.push_back({id,
                                     known(package_of_id_, item.at("package"), "a package"),
                                     item.at("memory_bytes").integer(0, kMaxMemory),
                                     {}});
    }
    if (machine_.numa_nodes.empty()) json_.at("numa_nodes").refuse("at least one NUMA node");
  }

  static CpuSet cpu_set(const CheckedJson& json) {
    try {
      return CpuSet::parse(json.text(size_t{1} << 20));
    } catch (const Error&) {
      json.refuse("a list of processors such as \"0-3,8\"");
    }
  }

  void read_cores() {
    std::set<int> seen;
    for (const CheckedJson& item : json_.at("cores").list(CpuSet::kMaxPu)) {
      Core core{known(package_of_id_, item.at("package"), "a package"),
                known(numa_of_id_, item.at("numa"), "a NUMA node"), cpu_set(item.at("cpus")).pus()};
      if (core.pus.empty()) item.at("cpus").refuse("at least one processor");
      for (int pu : core.pus) {
        if (!seen.insert(pu).second) item.at("cpus").refuse("processors of no other core");
      }
      machine_.cores.push_back(std::move(core));
    }
    if (machine_.cores.empty()) json_.at("cores").refuse("at least one core");
    machine_.set_cpus();
  }

  std::vector<int> nodes(const CheckedJson& json) const {
    std::vector<int> near;
    for (const CheckedJson& id : json.list(kMaxNumaNodes)) near.push_back(known(numa_of_id_, id, "a NUMA node"));
    if (near.empty()) json.refuse("at least one NUMA node");
    return near;
  }

  static PciPath bridges(const CheckedJson& json) {
    PciPath path;
    for (const CheckedJson& bridge : json.list(kMaxBridges)) path.push_back(bridge.integer(0, INT64_MAX));
    return path;
  }

  static std::string pci(const CheckedJson& json) {
    std::string id;
    try {
      id = normalize_pci_bus_id(json.text());
    } catch (const Error&) {
      json.refuse("a PCI bus id such as \"0000:1b:00.0\"");
    }
    return id;
  }

  void read_gpus() {
    std::set<std::string> seen;
    for (const CheckedJson& item : json_.at("gpus").list(kMaxGpus)) {
      Gpu gpu;
      gpu.pci = pci(item.at("pci"));
      if (!seen.insert(gpu.pci).second) item.at("pci").refuse("the id of no other GPU");
      gpu.model = item.at("model").text();
      gpu.memory_bytes = item.at("memory_bytes").integer(0, kMaxMemory);
      gpu.pci_gigabytes_per_s = item.at("pci_gigabytes_per_s").number(0, 1e6);
      gpu.numa = nodes(item.at("numa"));
      gpu.path = bridges(item.at("bridges"));
      machine_.gpus.push_back(std::move(gpu));
    }
  }

  void read_nics() {
    for (const CheckedJson& item : json_.at("nics").list(kMaxNics)) {
      Nic nic;
      nic.name = item.at("name").text();
      nic.interface = item.at("interface").text();
      if (const CheckedJson id = item.at("pci"); !id.text().empty()) nic.pci = pci(id);
      nic.rdma = item.at("rdma").boolean();
      nic.active = item.at("active").boolean();
      nic.port = integer(item.at("port"), 0, kMaxRdmaPorts);
      for (const CheckedJson& port : item.at("ports").list(kMaxRdmaPorts)) {
        nic.ports.push_back({integer(port.at("number"), 1, kMaxRdmaPorts), port.at("active").boolean(),
                             port.at("ethernet").boolean(), port.at("megabits_per_s").integer(0, kMaxMegabytes)});
      }
      nic.numa = nodes(item.at("numa"));
      nic.path = bridges(item.at("bridges"));
      machine_.nics.push_back(std::move(nic));
    }
  }

  static Link link(const CheckedJson& json) {
    const std::string name = json.at("kind").text();
    const auto* const kind =
        std::find_if(kLinkKinds.begin(), kLinkKinds.end(), [&](LinkKind k) { return to_string(k) == name; });
    if (kind == kLinkKinds.end()) json.at("kind").refuse("self, NVLink, PCI switch, PCI root, socket or system");
    return {*kind, json.at("megabytes_per_s").integer(0, kMaxMegabytes)};
  }

  void read_links() {
    const CheckedJson all = json_.at("links");
    const size_t gpus = machine_.gpus.size();
    const auto check_size = [&](const CheckedJson& json, size_t size) {
      if (size != gpus) json.refuse("as long as the list of GPUs, " + std::to_string(gpus));
    };
    for (const CheckedJson& row : all.list(kMaxGpus)) {
      auto& links = machine_.links.emplace_back();
      for (const CheckedJson& item : row.list(kMaxGpus)) links.push_back(link(item));
      check_size(row, links.size());
    }
    check_size(all, machine_.links.size());
    for (size_t i = 0; i < gpus; ++i) {
      for (size_t j = 0; j <= i; ++j) {
        if (machine_.links[i][j] != machine_.links[j][i] ||
            (i == j) != (machine_.links[i][j].kind == LinkKind::kSelf)) {
          all.refuse("alike in both directions and \"self\" from a GPU to itself alone, as between GPUs " +
                     std::to_string(j) + " and " + std::to_string(i));
        }
      }
    }
  }

  const CheckedJson& json_;
  Machine machine_;
  std::map<int, int> package_of_id_;
  std::map<int, int> numa_of_id_;
};

NetInterface interface_of(const CheckedJson& json) {
  NetInterface interface;
  interface.name = json.at("name").text();
  interface.up = json.at("up").boolean();
  interface.loopback = json.at("loopback").boolean();
  interface.megabits_per_s = json.at("megabits_per_s").integer(0, kMaxMegabytes);
  for (const CheckedJson& address : json.at("addresses").list(kMaxAddresses)) {
    interface.addresses.push_back(address.text());
  }
  interface.pci = json.at("pci").text();
  return interface;
}

Host host_of(const CheckedJson& json) {
  Host host{MachineReader(json).read()};
  host.cuda = json.at("cuda").boolean();
  if (json.has("visible_devices")) host.visible_devices = json.at("visible_devices").text();
  for (const CheckedJson& item : json.at("interfaces").list(kMaxInterfaces)) {
    host.interfaces.push_back(interface_of(item));
  }
  return host;
}

}  // namespace

nlohmann::json host_to_json(const Host& host) {
  const Machine& machine = host.machine;
  nlohmann::json out;
  out["host"] = printable(machine.host);
  out["memory_bytes"] = machine.memory_bytes();
  out["packages"] = nlohmann::json::array();
  for (const Package& package : machine.packages) {
    out["packages"].push_back(
        {{"id", package.id}, {"model", printable(package.model)}, {"cpus", package.cpus.to_string()}});
  }
  out["numa_nodes"] = nlohmann::json::array();
  for (const NumaNode& node : machine.numa_nodes) {
    out["numa_nodes"].push_back({{"id", node.id},
                                 {"package", machine.packages[node.package].id},
                                 {"memory_bytes", node.memory_bytes},
                                 {"cpus", node.cpus.to_string()}});
  }
  out["cores"] = nlohmann::json::array();
  for (const Core& core : machine.cores) {
    out["cores"].push_back({{"package", machine.packages[core.package].id},
                            {"numa", machine.numa_nodes[core.numa].id},
                            {"cpus", CpuSet(core.pus).to_string()}});
  }
  if (machine.cpu_quota > 0) out["cpu_quota"] = machine.cpu_quota;
  put_devices(machine, out);
  out["cuda"] = host.cuda;
  out["visible_devices"] = host.visible_devices ? nlohmann::json(printable(*host.visible_devices)) : nlohmann::json();
  out["interfaces"] = nlohmann::json::array();
  for (const NetInterface& interface : host.interfaces) {
    out["interfaces"].push_back({{"name", printable(interface.name)},
                                 {"up", interface.up},
                                 {"loopback", interface.loopback},
                                 {"megabits_per_s", interface.megabits_per_s},
                                 {"addresses", interface.addresses},
                                 {"pci", interface.pci}});
  }
  return out;
}

Host host_from_json(const nlohmann::json& json, const std::string& source) {
  return host_of(CheckedJson(json, "topology", source));
}

void write_cluster(const std::string& path, const std::vector<Host>& hosts) {
  const nlohmann::json head{{"format", kFormat}, {"version", kVersion}};
  std::string text = head.dump();
  text.pop_back();
  text += ",\"hosts\":[";  // one line for each host, so that `diff` can compare two files
  for (const Host& host : hosts) text += (text.back() == '[' ? "\n" : ",\n") + host_to_json(host).dump();
  write_atomically(FileSystem::real(), path, text + "\n]}\n");
}

std::vector<Host> read_cluster(const std::string& path) {
  const nlohmann::json json = parse_checked_json(read_small_file("topology", path, kMaxBytes), "topology", path);
  const CheckedJson whole(json, "topology", path);
  if (!whole.has("format") || whole.at("format").text() != kFormat) {
    throw Error(ErrorKind::kInput, "topology",
                path + ": it does not describe a cluster; give a file that `annulus topology --save FILE` wrote");
  }
  if (whole.at("version").integer(1, INT32_MAX) != kVersion) {
    throw Error(ErrorKind::kInput, "topology",
                path + ": another version of annulus wrote it, in version " +
                    std::to_string(whole.at("version").integer(1, INT32_MAX)) +
                    " of the format; this one reads version 1, so write the file again with this one");
  }
  std::vector<Host> hosts;
  for (const CheckedJson& item : whole.at("hosts").list(kMaxHosts)) hosts.push_back(host_of(item));
  if (hosts.empty()) whole.at("hosts").refuse("at least one host");
  return hosts;
}

}  // namespace annulus
