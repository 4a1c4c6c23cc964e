// See report.h.
#include "launcher/topology/report.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "common/text.h"
#include "launcher/topology/cluster.h"

namespace annulus {
namespace {

constexpr size_t kMatrixGpus = 16;
constexpr size_t kRingWidth = 100;
constexpr size_t kRings = 8;  // rings beyond these are only counted

// A table whose columns are as wide as their widest cell, with two blanks between them. Names are aligned left, numbers
// right.
class Table {
 public:
  // A heading that begins with '<' is that of a column of names, one with '>' that of a column of numbers.
  explicit Table(const std::vector<std::string>& headings) {
    left_.reserve(headings.size());
    std::vector<std::string> row;
    row.reserve(headings.size());
    for (const std::string& heading : headings) left_.push_back(heading.front() == '<');
    for (const std::string& heading : headings) row.push_back(heading.substr(1));
    rows_.push_back(std::move(row));
  }

  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }

  std::string print() const {
    std::vector<size_t> width(left_.size(), 0);
    for (const auto& row : rows_) {
      for (size_t c = 0; c < row.size(); ++c) width[c] = std::max(width[c], row[c].size());
    }
    std::string out;
    for (const auto& row : rows_) {
      std::string line = " ";
      for (size_t c = 0; c < row.size(); ++c) {
        const std::string pad(width[c] - row[c].size(), ' ');
        line += (c == 0 ? " " : "  ") + (left_[c] ? row[c] + pad : pad + row[c]);
      }
      line.erase(line.find_last_not_of(' ') + 1);
      out += line + '\n';
    }
    return out;
  }

 private:
  std::vector<bool> left_;
  std::vector<std::vector<std::string>> rows_;
};

std::string bytes(int64_t n) {
  if (n <= 0) return "-";
  double value = static_cast<double>(n);
  size_t unit = 0;
  static constexpr std::array<const char*, 5> kUnits{"B", "KiB", "MiB", "GiB", "TiB"};
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return rounded(value, value < 10 && unit > 0 ? 1 : 0) + " " + kUnits[unit];
}

std::string gigabytes(int64_t megabytes_per_s) {
  const double value = static_cast<double>(megabytes_per_s) / 1000;
  return rounded(value, value < 10 ? 1 : 0);
}

// A long list of processors (such as every second one of 256) is cut and ends in their number.
std::string cpu_list(const CpuSet& cpus) {
  const std::string text = cpus.to_string();
  return text.size() <= 28 ? text : text.substr(0, text.rfind(',', 18)) + ",.. (" + std::to_string(cpus.size()) + ")";
}

std::string node_ids(const Machine& machine, const std::vector<int>& indices) {
  std::vector<int> ids;
  ids.reserve(indices.size());
  for (int i : indices) ids.push_back(machine.numa_nodes[i].id);
  const std::string text = CpuSet(std::move(ids)).to_string();
  return text.size() <= 12 ? text : "any";
}

// Returns for example "RDMA, InfiniBand 400 Gb/s"; the speed is that of the port that is used.
std::string nic_kind(const Nic& nic) {
  std::string text = nic.rdma ? "RDMA" : "network";
  if (!nic.active) return text + ", no port up";
  for (const RdmaPort& port : nic.ports) {
    if (port.number != nic.port) continue;
    text += port.ethernet ? ", RoCE" : ", InfiniBand";
    if (port.megabits_per_s > 0) text += " " + gigabytes(port.megabits_per_s) + " Gb/s";
  }
  return text;
}

std::string hop_text(const Hop& hop) {
  if (hop.other_host) return "network";
  if (hop.link.megabytes_per_s == 0) {  // between CPU ranks
    return hop.link.kind == LinkKind::kSystem ? "memory across sockets" : "memory";
  }
  std::string text(to_string(hop.link.kind));
  if (hop.link.kind == LinkKind::kNvlink) text += " " + gigabytes(hop.link.megabytes_per_s) + " GB/s";
  return text;
}

bool slower(const Hop& a, const Hop& b) {
  if (a.other_host != b.other_host) return a.other_host;
  if (a.link.megabytes_per_s != b.link.megabytes_per_s) return a.link.megabytes_per_s < b.link.megabytes_per_s;
  return a.link.kind > b.link.kind;
}

std::string matrix(const Machine& machine) {
  bool nvlink = false;
  bool other = false;
  std::vector<std::string> headings{"<"};
  for (size_t i = 0; i < machine.gpus.size(); ++i) headings.push_back(">GPU" + std::to_string(i));
  Table table(headings);
  for (size_t i = 0; i < machine.gpus.size(); ++i) {
    std::vector<std::string> row{"GPU" + std::to_string(i)};
    for (size_t j = 0; j < machine.gpus.size(); ++j) {
      const Link& link = machine.links[i][j];
      switch (link.kind) {
        case LinkKind::kSelf:
          row.push_back("-");
          break;
        case LinkKind::kNvlink:
          row.push_back(gigabytes(link.megabytes_per_s));
          nvlink = true;
          break;
        default:
          row.emplace_back(to_string(link.kind).substr(
              link.kind == LinkKind::kPciSwitch || link.kind == LinkKind::kPciRoot ? 4 : 0));
          other = true;
      }
    }
    table.add(std::move(row));
  }
  std::string title = "\n  links between GPUs";
  if (nvlink) title += ", NVLink in GB/s";
  if (nvlink && machine.nvswitches > 0) title += " through " + counted(machine.nvswitches, "NVSwitch");
  if (other) title += nvlink ? ", others by PCI" : " by PCI (nearest first: switch, root, socket, system)";
  return title + "\n" + table.print();
}

// Returns "  ring  0 -> 1 -> 0" for one ring, and "  ring 0  0 -> 1 -> 0" and so on for the first of several rings.
std::string ring_lines(const Placement& placement) {
  const size_t context = static_cast<size_t>(placement.context);
  const size_t rings = placement.ranks.size() / context;
  std::string out;
  for (size_t ring = 0; ring < std::min(rings, kRings); ++ring) {
    const std::string begin = rings == 1 ? "  ring  " : "  ring " + std::to_string(ring) + "  ";
    out += begin;
    size_t column = 0;
    for (size_t i = 0; i <= context && (i < context || context > 1); ++i) {
      const int rank = placement.ranks[ring * context + i % context].rank;
      const std::string piece = (i == 0 ? "" : " -> ") + std::to_string(rank);
      if (column + piece.size() > kRingWidth) {
        out += "\n" + std::string(begin.size(), ' ');
        column = 0;
      }
      out += piece;
      column += piece.size();
    }
    out += "\n";
  }
  if (rings > kRings) out += "  and " + counted(rings - kRings, "more ring") + ", in the order of the ranks\n";
  return out;
}

}  // namespace

std::string to_table(const Machine& machine) {
  size_t packages = 0;
  for (const Package& package : machine.packages) packages += package.cpus.empty() ? 0 : 1;
  std::string out = "host " + printable(machine.host, 40) + ": " + counted(packages, "package") + ", " +
                    counted(machine.numa_nodes.size(), "NUMA node") + ", " + counted(machine.cores.size(), "core") +
                    " (" + counted(machine.cpus().size(), "thread") + "), " + bytes(machine.memory_bytes()) +
                    " memory, " + counted(machine.gpus.size(), "GPU") + ", " + counted(machine.nics.size(), "NIC") +
                    "\n";
  if (machine.cpu_quota > 0) {
    out += "  its control group has the time of " + significant(machine.cpu_quota, 4) + " processors\n";
  }
  if (!machine.packages.empty() && !machine.packages.front().model.empty()) {
    out += "  " + printable(machine.packages.front().model, 100) + "\n";
  }

  out += "\n";
  Table nodes({">NUMA", ">package", ">memory", ">cores", "<cpus"});
  std::vector<size_t> cores(machine.numa_nodes.size(), 0);
  for (const Core& core : machine.cores) ++cores[core.numa];
  for (size_t i = 0; i < machine.numa_nodes.size(); ++i) {
    const NumaNode& node = machine.numa_nodes[i];
    nodes.add({std::to_string(node.id), std::to_string(machine.packages[node.package].id), bytes(node.memory_bytes),
               std::to_string(cores[i]), cpu_list(node.cpus)});
  }
  out += nodes.print();

  if (!machine.gpus.empty()) {
    out += "\n";
    Table gpus({"<GPU", "<PCI", "<model", ">memory", ">NUMA", ">PCI GB/s"});
    for (size_t i = 0; i < machine.gpus.size(); ++i) {
      const Gpu& gpu = machine.gpus[i];
      gpus.add({"GPU" + std::to_string(i), gpu.pci, printable(gpu.model, 40), bytes(gpu.memory_bytes),
                node_ids(machine, gpu.numa),
                gpu.pci_gigabytes_per_s > 0 ? gigabytes(static_cast<int64_t>(gpu.pci_gigabytes_per_s * 1000)) : "-"});
    }
    out += gpus.print();
  }
  if (!machine.nics.empty()) {
    out += "\n";
    Table nics({"<NIC", "<interface", "<PCI", ">NUMA", "<kind"});
    for (const Nic& nic : machine.nics) {
      nics.add({printable(nic.name, 24), nic.interface.empty() ? "-" : printable(nic.interface, 24),
                nic.pci.empty() ? "-" : nic.pci, node_ids(machine, nic.numa), nic_kind(nic)});
    }
    out += nics.print();
  }
  if (machine.gpus.size() > 1 && machine.gpus.size() <= kMatrixGpus) out += matrix(machine);
  return out;
}

std::string to_table(const std::vector<NetInterface>& interfaces) {
  Table table({"<interface", "<state", ">Gb/s", "<PCI", "<addresses"});
  for (const NetInterface& interface : interfaces) {
    table.add({printable(interface.name, 20),
               interface.loopback ? "loopback"
               : interface.up     ? "up"
                                  : "down",
               interface.megabits_per_s > 0 ? gigabytes(interface.megabits_per_s) : "-",
               interface.pci.empty() ? "-" : printable(interface.pci, 16),
               printable(join(interface.addresses, " "), 60)});
  }
  return table.print();
}

std::string to_table(const std::vector<Machine>& hosts, const Placement& placement) {
  const bool cuda = !placement.ranks.empty() && placement.ranks.front().device == DeviceKind::kCuda;
  std::vector<std::string> headings{">rank", "<host", ">local"};
  if (cuda) {
    headings.insert(headings.end(), {"<device", "<PCI"});
  } else {
    headings.push_back("<device");
  }
  headings.insert(headings.end(), {">NUMA", "<cpus", ">threads", "<memory", "<NIC", "<next in the ring"});
  Table table(headings);
  for (size_t i = 0; i < placement.ranks.size(); ++i) {
    const RankPlacement& rank = placement.ranks[i];
    std::vector<std::string> row{std::to_string(rank.rank), printable(rank.host, 20), std::to_string(rank.local_rank)};
    if (cuda) {
      row.push_back("GPU" + std::to_string(rank.gpu));
      row.push_back(rank.gpu_pci);
    } else {
      row.emplace_back("cpu");
    }
    row.push_back(std::to_string(rank.numa_node));
    row.push_back(cpu_list(rank.cpus) + (rank.oversubscribed ? " *" : ""));
    row.push_back(std::to_string(rank.threads));
    row.push_back("node " + CpuSet(rank.memory_nodes).to_string());
    row.push_back(rank.nic < 0 ? "-" : printable(rank.nic_name, 14));
    row.push_back(
        placement.hops.empty() ? "-" : std::to_string(placement.hops[i].to) + " over " + hop_text(placement.hops[i]));
    table.add(std::move(row));
  }
  std::string out = table.print();

  out += "\n" + ring_lines(placement);
  if (!placement.hops.empty()) {
    const Hop& slowest = *std::min_element(placement.hops.begin(), placement.hops.end(), slower);
    out += "  slowest link: " + std::to_string(slowest.from) + " -> " + std::to_string(slowest.to) + ", " +
           hop_text(slowest) + "\n";
  }
  if (placement.oversubscribed) {
    size_t cores = 0;
    std::vector<bool> used(hosts.size(), false);
    for (const RankPlacement& rank : placement.ranks) used[rank.host_index] = true;
    for (size_t h = 0; h < hosts.size(); ++h) cores += used[h] ? hosts[h].cores.size() : 0;
    out += "  * shares a core with another rank: " + counted(placement.ranks.size(), "rank") + " on " +
           counted(cores, "core") + "\n";
  }
  return out;
}

nlohmann::json to_json(const Placement& placement) {
  nlohmann::json out;
  out["ranks"] = nlohmann::json::array();
  for (const RankPlacement& rank : placement.ranks) {
    nlohmann::json entry{{"rank", rank.rank},
                         {"host_index", rank.host_index},
                         {"host", printable(rank.host)},
                         {"local_rank", rank.local_rank},
                         {"device", to_string(rank.device)},
                         {"numa", rank.numa_node},
                         {"cpus", rank.cpus.to_string()},
                         {"memory_nodes", rank.memory_nodes},
                         {"cores", rank.cores},
                         {"threads", rank.threads},
                         {"oversubscribed", rank.oversubscribed}};
    entry["gpu"] = rank.gpu < 0 ? nlohmann::json() : nlohmann::json(rank.gpu);
    entry["gpu_pci"] = rank.gpu < 0 ? nlohmann::json() : nlohmann::json(rank.gpu_pci);
    entry["hca"] = rank.hca.empty() ? nlohmann::json() : nlohmann::json(printable(rank.hca));
    entry["nic"] = rank.nic < 0 ? nlohmann::json() : nlohmann::json(printable(rank.nic_name));
    out["ranks"].push_back(std::move(entry));
  }
  out["rings"] = nlohmann::json::array();
  for (size_t i = 0; i < placement.ranks.size(); ++i) {
    if (i % static_cast<size_t>(placement.context) == 0) out["rings"].push_back(nlohmann::json::array());
    out["rings"].back().push_back(placement.ranks[i].rank);
  }
  out["hops"] = nlohmann::json::array();
  for (const Hop& hop : placement.hops) {
    out["hops"].push_back({{"from", hop.from},
                           {"to", hop.to},
                           {"kind", hop.other_host ? std::string_view("network") : to_string(hop.link.kind)},
                           {"megabytes_per_s", hop.link.megabytes_per_s}});
  }
  out["oversubscribed"] = placement.oversubscribed;
  return out;
}

std::string topology_table(const std::vector<Machine>& hosts, const Placement& placement) {
  std::string out;
  std::vector<std::string> seen;
  for (const Machine& machine : hosts) {
    if (std::find(seen.begin(), seen.end(), machine.host) != seen.end()) continue;
    seen.push_back(machine.host);
    out += to_table(machine) + "\n";
  }
  return out + "placement of " + counted(placement.ranks.size(), "rank") + "\n\n" + to_table(hosts, placement);
}

nlohmann::json topology_json(const std::vector<Host>& hosts, const Placement& placement) {
  nlohmann::json out;
  out["hosts"] = nlohmann::json::array();
  for (const Host& host : hosts) out["hosts"].push_back(host_to_json(host));
  out["placement"] = to_json(placement);
  return out;
}

}  // namespace annulus
