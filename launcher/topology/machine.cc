// See machine.h.
#include "launcher/topology/machine.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <map>
#include <set>
#include <system_error>
#include <utility>

#include "common/error.h"
#include "common/text.h"
#include "launcher/topology/hwloc_reader.h"

namespace annulus {

std::string_view to_string(LinkKind kind) {
  constexpr std::array<std::string_view, 6> kNames = {"self", "NVLink", "PCI switch", "PCI root", "socket", "system"};
  return kNames.at(static_cast<size_t>(kind));
}

std::string normalize_pci_bus_id(std::string_view id) {
  const auto fail = [&]() {
    throw Error(ErrorKind::kInput, "topology",
                "expected a PCI bus id such as 0000:1b:00.0, got \"" + std::string(id.substr(0, 40)) + "\"");
  };
  std::vector<unsigned> parts;
  std::string_view rest = id;
  for (const char* separators = "::.";; ++separators) {
    unsigned value = 0;
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), value, 16);
    if (error != std::errc()) fail();
    parts.push_back(value);
    rest.remove_prefix(end - rest.data());
    if (rest.empty()) break;
    if (*separators == '\0') fail();
    // If the domain is left out, a dot follows the second number.
    if (rest.front() == '.' && parts.size() == 2) {
      parts.insert(parts.begin(), 0);
      ++separators;
    }
    if (rest.front() != *separators) fail();
    rest.remove_prefix(1);
  }
  if (parts.size() != 4 || parts[0] > 0xffffff || parts[1] > 0xff || parts[2] > 0x1f || parts[3] > 7) fail();
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%04x:%02x:%02x.%x", parts[0], parts[1], parts[2], parts[3]);
  return text.data();
}

LinkKind pci_distance(const Machine& machine, const PciPath& a_path, const std::vector<int>& a_numa,
                      const PciPath& b_path, const std::vector<int>& b_numa) {
  size_t shared = 0;
  while (shared < a_path.size() && shared < b_path.size() && a_path[shared] == b_path[shared]) ++shared;
  if (shared >= 2) return LinkKind::kPciSwitch;
  if (shared == 1) return LinkKind::kPciRoot;
  // kPackage only if both are known to be in the same package.
  std::set<int> packages;
  for (const auto* list : {&a_numa, &b_numa}) {
    for (int node : *list) packages.insert(machine.numa_nodes[node].package);
  }
  return packages.size() == 1 ? LinkKind::kPackage : LinkKind::kSystem;
}

void derive_links(Machine& machine) {
  const size_t n = machine.gpus.size();
  double best = 0;
  for (const Gpu& gpu : machine.gpus) best = std::max(best, gpu.pci_gigabytes_per_s);
  const int64_t nominal = best > 0 ? static_cast<int64_t>(std::llround(best * 1000)) : 32000;
  machine.links.assign(n, std::vector<Link>(n));
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = 0; j < n; ++j) {
      if (i == j) {
        machine.links[i][j] = {LinkKind::kSelf, 0};
        continue;
      }
      const Gpu& a = machine.gpus[i];
      const Gpu& b = machine.gpus[j];
      const LinkKind kind = pci_distance(machine, a.path, a.numa, b.path, b.numa);
      int64_t speed = nominal;
      if (kind == LinkKind::kPciRoot) speed = nominal * 3 / 4;
      if (kind == LinkKind::kPackage) speed = nominal / 2;
      if (kind == LinkKind::kSystem) speed = nominal / 4;
      machine.links[i][j] = {kind, speed};
    }
  }
}

void Nic::set_ports(std::vector<RdmaPort> of_device) {
  ports = std::move(of_device);
  const auto up = std::find_if(ports.begin(), ports.end(), [](const RdmaPort& p) { return p.active; });
  active = ports.empty() || up != ports.end();
  port = up == ports.end() ? 0 : up->number;
}

void Machine::set_cpus() {
  std::map<int, std::vector<int>> by_package, by_numa;
  for (const Core& core : cores) {
    by_package[core.package].insert(by_package[core.package].end(), core.pus.begin(), core.pus.end());
    by_numa[core.numa].insert(by_numa[core.numa].end(), core.pus.begin(), core.pus.end());
  }
  for (auto& [i, pus] : by_package) packages[i].cpus = CpuSet(std::move(pus));
  for (auto& [i, pus] : by_numa) numa_nodes[i].cpus = CpuSet(std::move(pus));
}

CpuSet Machine::cpus() const {
  std::vector<int> all;
  for (const Core& core : cores) all.insert(all.end(), core.pus.begin(), core.pus.end());
  return CpuSet(std::move(all));
}

int64_t Machine::memory_bytes() const {
  int64_t total = 0;
  for (const NumaNode& node : numa_nodes) {
    total = node.memory_bytes > (int64_t{1} << 62) - total ? int64_t{1} << 62 : total + node.memory_bytes;
  }
  return total;
}

void Machine::keep_hcas(const std::vector<std::string>& hcas) {
  std::vector<Nic> kept;
  for (Nic& nic : nics) {
    bool named = !nic.rdma;
    for (const std::string& hca : hcas) {
      const size_t colon = hca.find(':');
      if (!nic.rdma || hca.substr(0, colon) != nic.name) continue;
      named = true;
      if (colon != std::string::npos) nic.port = leading_number<int>(hca.substr(colon + 1));
    }
    if (named) kept.push_back(std::move(nic));
  }
  nics = std::move(kept);
}

void Machine::hide_gpus_from_cuda(std::string_view visible_devices) {
  for (const Gpu& gpu : gpus) {
    if (gpu.model != gpus.front().model) return;
  }
  std::vector<std::string> shown;
  bool ended = false;
  for (size_t begin = 0; begin < visible_devices.size();) {
    const size_t comma = std::min(visible_devices.find(',', begin), visible_devices.size());
    const char* const end = visible_devices.data() + comma;
    int64_t number = 0;
    const auto [past, error] = std::from_chars(visible_devices.data() + begin, end, number);
    if (error != std::errc() || past != end) return;
    ended = ended || number < 0 || number >= static_cast<int64_t>(gpus.size());
    if (!ended) shown.push_back(gpus[number].pci);
    begin = comma + 1;
  }
  set_visible_gpus(shown);
}

void Machine::set_visible_gpus(const std::vector<std::string>& pci_bus_ids) {
  std::set<std::string> wanted;
  for (const std::string& id : pci_bus_ids) wanted.insert(normalize_pci_bus_id(id));
  if (wanted.size() > kMaxGpus) throw Error(ErrorKind::kInput, "topology", "more than 1024 GPUs were named");
  const std::vector<Gpu> old = gpus;
  const std::vector<std::vector<Link>> old_links = links;
  gpus.clear();
  std::vector<size_t> from;  // the previous index, or old.size() for a new GPU
  for (const std::string& id : wanted) {
    const auto it = std::find_if(old.begin(), old.end(), [&](const Gpu& gpu) { return gpu.pci == id; });
    from.push_back(static_cast<size_t>(it - old.begin()));
    if (it != old.end()) {
      gpus.push_back(*it);
      continue;
    }
    Gpu gpu;
    gpu.pci = id;
    gpu.model = "GPU";
    for (size_t i = 0; i < numa_nodes.size(); ++i) gpu.numa.push_back(static_cast<int>(i));
    gpus.push_back(std::move(gpu));
  }
  derive_links(*this);
  for (size_t i = 0; i < from.size(); ++i) {
    for (size_t j = 0; j < from.size(); ++j) {
      if (from[i] < old.size() && from[j] < old.size()) links[i][j] = old_links[from[i]][from[j]];
    }
  }
}

}  // namespace annulus
