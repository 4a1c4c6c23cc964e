// Implements machine_xml.h.
#include "tests/launcher/topology/machine_xml.h"

#include <array>
#include <cstdint>
#include <cstdio>

namespace annulus::testing {
namespace {

std::string mask(const std::vector<int>& bits) {
  std::vector<uint32_t> words(1, 0);
  for (int bit : bits) {
    const auto word = static_cast<size_t>(bit) / 32;
    if (word >= words.size()) words.resize(word + 1, 0);
    words[word] |= uint32_t{1} << (bit % 32);
  }
  std::string out;
  for (size_t i = words.size(); i-- > 0;) {
    std::array<char, 16> text{};
    std::snprintf(text.data(), text.size(), "0x%08x", words[i]);
    out += (out.empty() ? "" : ",") + std::string(text.data());
  }
  return out;
}

std::vector<int> range(int begin, int end) {
  std::vector<int> out;
  for (int i = begin; i < end; ++i) out.push_back(i);
  return out;
}

std::string bus_id(int bus) {
  std::array<char, 16> text{};
  std::snprintf(text.data(), text.size(), "0000:%02x:00.0", static_cast<unsigned>(bus) & 0xffU);
  return text.data();
}

class Writer {
 public:
  explicit Writer(const MadeUpMachine& machine) : machine_(machine) {}

  std::string write() {
    const int cores = machine_.packages * machine_.nodes_per_package * machine_.cores_per_node;
    cores_ = cores;
    const std::string all = mask(range(0, cores * machine_.threads_per_core));
    const int nodes = machine_.packages * machine_.nodes_per_package;
    const std::string all_nodes = mask(range(0, nodes));
    out_ =
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<!DOCTYPE topology SYSTEM \"hwloc2.dtd\">\n"
        "<topology version=\"2.0\">\n";
    open("Machine", 0, range(0, cores), range(0, nodes),
         "allowed_cpuset=\"" + all + "\" allowed_nodeset=\"" + all_nodes + "\"");
    int bus = 1;
    for (int p = 0; p < machine_.packages; ++p) {
      const int per = machine_.nodes_per_package * machine_.cores_per_node;
      const auto package_nodes = range(p * machine_.nodes_per_package, (p + 1) * machine_.nodes_per_package);
      open("Package", p, range(p * per, (p + 1) * per), package_nodes);
      for (int node : package_nodes) {
        const auto own = range(node * machine_.cores_per_node, (node + 1) * machine_.cores_per_node);
        if (machine_.nodes_per_package > 1) open("Group", node, own, {node});
        open("NUMANode", node, own, {node}, "local_memory=\"1073741824\"");
        close();
        for (int core : own) {
          open("Core", core, {core}, {node});
          for (int t = 0; t < machine_.threads_per_core; ++t) {
            out_ += "<object type=\"PU\"" + sets({core + t * cores}, {node}) + " os_index=\"" +
                    std::to_string(core + t * cores) + "\"/>\n";
          }
          close();
        }
        if (machine_.nodes_per_package > 1) close();
      }
      const int gpus = static_cast<size_t>(p) < machine_.gpus.size() ? machine_.gpus[static_cast<size_t>(p)] : 0;
      if (gpus + machine_.nics_per_package > 0) write_devices(gpus, bus);
      close();
    }
    close();
    return out_ + "</topology>\n";
  }

 private:
  void write_devices(int gpus, int& bus) {
    out_ += "<object type=\"Bridge\" gp_index=\"" + id() + "\" bridge_type=\"0-1\" depth=\"0\" bridge_pci=\"0000:[" +
            "00-ff]\">\n";
    for (int g = 0; g < gpus; g += 2) {
      const int bridge = bus++;
      out_ += "<object type=\"Bridge\" gp_index=\"" + id() +
              "\" bridge_type=\"1-1\" depth=\"1\" bridge_pci=\"0000:[00-ff]\" pci_busid=\"" + bus_id(bridge) +
              "\" pci_type=\"0604 [1000:c030] [1000:c030] b0\" pci_link_speed=\"63.0\">\n";
      for (int i = g; i < gpus && i < g + 2; ++i) {
        out_ += "<object type=\"PCIDev\" gp_index=\"" + id() + "\" pci_busid=\"" + bus_id(bus++) +
                "\" pci_type=\"0302 [10de:2335] [10de:18be] a1\" pci_link_speed=\"63.0\"/>\n";
      }
      out_ += "</object>\n";
    }
    for (int n = 0; n < machine_.nics_per_package; ++n) {
      out_ += "<object type=\"PCIDev\" gp_index=\"" + id() + "\" pci_busid=\"" + bus_id(bus++) +
              "\" pci_type=\"0207 [15b3:1021] [15b3:0041] 00\" pci_link_speed=\"63.0\">\n<object type=\"OSDev\" "
              "gp_index=\"" +
              id() + "\" name=\"mlx5_" + std::to_string(nic_++) + "\" osdev_type=\"3\"/></object>\n";
    }
    out_ += "</object>\n";
  }

  std::string id() { return std::to_string(++last_id_); }

  std::string sets(const std::vector<int>& pus, const std::vector<int>& nodes) {
    const std::string c = mask(pus);
    const std::string n = mask(nodes);
    return " gp_index=\"" + id() + "\" cpuset=\"" + c + "\" complete_cpuset=\"" + c + "\" nodeset=\"" + n +
           "\" complete_nodeset=\"" + n + "\"";
  }

  void open(const std::string& type, int index, const std::vector<int>& cores, const std::vector<int>& nodes,
            const std::string& more = "") {
    std::vector<int> pus;
    for (int t = 0; t < machine_.threads_per_core; ++t) {
      for (int core : cores) pus.push_back(core + t * cores_);
    }
    out_ += "<object type=\"" + type + "\" os_index=\"" + std::to_string(index) + "\"" + sets(pus, nodes) + " " + more +
            ">\n";
  }

  void close() { out_ += "</object>\n"; }

  MadeUpMachine machine_;
  std::string out_;
  int cores_ = 0;
  int last_id_ = 0;
  int nic_ = 0;
};

}  // namespace

std::string to_xml(const MadeUpMachine& machine) { return Writer(machine).write(); }

}  // namespace annulus::testing
