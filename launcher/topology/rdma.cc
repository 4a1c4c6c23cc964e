// See rdma.h.
#include "launcher/topology/rdma.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "common/error.h"
#include "common/files.h"
#include "common/text.h"

namespace annulus {
namespace {

namespace fs = std::filesystem;

// Returns the names in a folder in order, or none if it cannot be read.
std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    names.insert(it->path().filename().string());
  }
  return names;
}

// "400 Gb/sec (4X NDR)" -> 400000, "2.5 Gb/sec (1X SDR)" -> 2500.
int64_t megabits(std::string_view rate) {
  const auto gigabits = leading_number<double>(rate);
  return gigabits > 0 && gigabits < 1e6 ? static_cast<int64_t>(gigabits * 1000) : 0;
}

std::vector<RdmaPort> ports_in(const fs::path& device) {
  std::map<int, RdmaPort> ports;
  for (const std::string& name : names_in(device / "ports")) {
    const fs::path folder = device / "ports" / name;
    RdmaPort port;
    port.number = number_of_text<int>(name).value_or(0);
    if (port.number < 1 || port.number > kMaxRdmaPorts) continue;
    port.active = first_line(folder / "state").starts_with("4");  // "4: ACTIVE"
    port.ethernet = first_line(folder / "link_layer") == "Ethernet";
    port.megabits_per_s = megabits(first_line(folder / "rate"));
    ports.emplace(port.number, port);
  }
  std::vector<RdmaPort> list;
  for (const auto& [number, port] : ports) list.push_back(port);
  return list;
}

std::string pci_of(const fs::path& device) {
  std::error_code error;
  const std::string name = fs::read_symlink(device / "device", error).filename().string();
  try {
    return error ? "" : normalize_pci_bus_id(name);
  } catch (const Error&) {
    return "";  // a device in software
  }
}

Nic& nic_of(Machine& machine, const std::string& name, const fs::path& device) {
  const std::string pci = pci_of(device);
  const auto same = [&](const Nic& nic) {
    return (nic.rdma && nic.name == name) || (!pci.empty() && nic.pci == pci && !nic.rdma);
  };
  const auto found = std::find_if(machine.nics.begin(), machine.nics.end(), same);
  if (found != machine.nics.end()) return *found;
  Nic nic;
  nic.pci = pci;
  const std::string node = first_line(device / "device" / "numa_node");  // "-1" where the kernel does not know
  std::vector<int> all;
  for (size_t i = 0; i < machine.numa_nodes.size(); ++i) {
    all.push_back(static_cast<int>(i));
    if (std::to_string(machine.numa_nodes[i].id) == node) nic.numa = {static_cast<int>(i)};
  }
  if (nic.numa.empty()) nic.numa = std::move(all);
  const auto after = std::find_if(machine.nics.begin(), machine.nics.end(), [&](const Nic& other) {
    return other.pci.empty() || (!pci.empty() && other.pci > pci);
  });
  return *machine.nics.insert(pci.empty() ? machine.nics.end() : after, std::move(nic));
}

}  // namespace

void add_rdma(Machine& machine, const std::string& folder) {
  for (const std::string& name : names_in(folder)) {
    const fs::path device = fs::path(folder) / name;
    if (machine.nics.size() >= kMaxNics) return;
    Nic& nic = nic_of(machine, name, device);
    nic.rdma = true;
    nic.name = name;
    nic.set_ports(ports_in(device));
  }
}

}  // namespace annulus
