// annulus topology: shows what a machine, or the hosts of a job, consist of, and where ranks would go.
// launcher/topology/ and launcher/hosts/ do the work.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common/files.h"
#include "common/names.h"
#include "common/text.h"
#include "launcher/hosts/host_discovery.h"
#include "launcher/hosts/host_list.h"
#include "launcher/hosts/host_report.h"
#include "launcher/hosts/launcher_socket.h"
#include "launcher/network/network.h"
#include "launcher/subcommand.h"
#include "launcher/topology/cluster.h"
#include "launcher/topology/host_plan.h"
#include "launcher/topology/machine.h"
#include "launcher/topology/placement.h"
#include "launcher/topology/report.h"
#include "launcher/topology/topology_svg.h"

namespace annulus {
namespace {

using Environment = std::map<std::string, std::string>;

// What NCCL and MPI are told on a host: by annulus for the job, and by variables that are set there.
std::vector<std::string> told(const Network& network, const Environment& environment) {
  const std::vector<Variable> variables = network_variables(network, "");
  std::vector<std::string> lines = settings(variables, environment).lines;
  for (const auto& [name, value] : environment) {
    const bool of_job = std::any_of(variables.begin(), variables.end(),
                                    [&](const Variable& variable) { return variable.name == name; });
    if (!of_job && !value.empty() && is_network_variable(name))
      lines.push_back(name + "=" + value + " is set in the environment");
  }
  for (std::string& line : lines) line = printable(line, 200);
  return lines;
}

// A text for each distinct host whose network is known.
std::string network_text(const std::vector<Host>& hosts, const std::vector<std::vector<std::string>>& told) {
  std::string out;
  std::set<std::string> seen;
  for (size_t h = 0; h < hosts.size(); ++h) {
    if (hosts[h].interfaces.empty() || !seen.insert(hosts[h].machine.host).second) continue;
    out += "\nnetwork of host " + printable(hosts[h].machine.host, 40) + "\n\n" + to_table(hosts[h].interfaces) +
           (told[h].empty() ? "\n  NCCL and MPI choose what they use\n" : "\n  NCCL and MPI are told\n");
    for (const std::string& line : told[h]) out += "  " + line + "\n";
  }
  return out;
}

class TopologySubcommand : public Subcommand {
 public:
  void declare(CLI::App& app) override {
    add_repeated(
        app, "--xml", xml_,
        "a machine described by an hwloc XML file (`lstopo machine.xml` writes one), one for each host of a job",
        "FILE");
    app.add_option("--load", load_, "a file that `topology --save` wrote: show its hosts instead of this one")
        ->type_name("FILE")
        ->excludes("--xml");
    app.add_option("--hosts", hosts_,
                   "show these hosts, a,b, or with the slots that a job may use on each: a:8,b:8 (default: the hosts "
                   "of the Slurm allocation, else this host)")
        ->type_name("LIST")
        ->excludes("--xml", "--load");
    app.add_option("--hostfile", hostfile_, "show the hosts in a file that names one per line: NAME slots=8")
        ->type_name("FILE")
        ->excludes("--xml", "--load", "--hosts");
    app.add_option("--save", save_, "write a description of the hosts to FILE, for --load on other machines")
        ->type_name("FILE");
    app.add_option("--svg", svg_, "draw hosts, ranks and rings in FILE")->type_name("FILE");
    app.add_option("-n,--np", ranks_, "place N ranks (default: one per GPU, or without GPUs one per NUMA node)")
        ->type_name("N");
    app.add_option("--context", context_,
                   "place rings of N ranks each, like mesh.context in a configuration (default: one ring of all ranks)")
        ->type_name("N");
    app.add_option("--device", device_,
                   "what the ranks run on: auto (default: as device = \"auto\" decides; for --load and --xml, cuda if "
                   "there are enough GPUs), cpu or cuda");
    app.add_option("--hcas", hcas_,
                   "the job's RDMA devices, mlx5_0,mlx5_1:1, like `launch --hcas` and [network] (default: "
                   "ANNULUS_HCAS, else all)")
        ->type_name("LIST");
    app.add_option("--interfaces", interfaces_,
                   "the job's interfaces, eth0,eth1, like `launch --interfaces` (default: ANNULUS_INTERFACES, or all)")
        ->type_name("LIST");
    app.add_flag("--json", json_, "print JSON instead of a table");
    app.footer(
        "Examples:\n  ./annulus topology -n 2\n"
        "  ./annulus topology -n 8 --context 4\n"
        "  ./annulus topology --save machine.json --svg machine.svg\n"
        "  ./annulus topology --hosts localhost:8 --context 4");
  }

  void check() override {
    if (ranks_ && (*ranks_ < 1 || *ranks_ > 65536)) {
      refuse_usage("topology -n takes a number of ranks from 1 to 65536, not " + std::to_string(*ranks_));
    }
    if (context_ < 0) {
      refuse_usage("topology --context takes a number of ranks, 1 or more, not " + std::to_string(context_));
    }
    index_of_name(device_, {"auto", "cpu", "cuda"}, "device", "topology --device");
    // The command line has precedence over the environment, as for `launch`.
    const Network typed = parse_network(interfaces_, hcas_, "auto", "topology --interfaces, --hcas");
    network_ = network_from_environment({});
    if (!typed.interfaces.empty()) network_.interfaces = typed.interfaces;
    if (!typed.hcas.empty()) network_.hcas = typed.hcas;
  }

  int run() override {
    for (const auto& [option, path] : {std::pair("--save ", &save_), std::pair("--svg ", &svg_)}) {
      if (!path->empty()) require_output("launcher", option + *path, *path);
    }
    const Gathered gathered = gather();
    std::vector<Host> hosts = gathered.hosts;
    if (!save_.empty()) write_cluster(save_, hosts);
    std::vector<std::vector<std::string>> network;
    for (const Environment& environment : gathered.environments) network.push_back(told(network_, environment));
    std::vector<Machine> machines;
    size_t gpus = 0, nodes = 0;
    for (Host& host : hosts) {
      host.machine = machine_for(host, network_.hcas);
      machines.push_back(host.machine);
      gpus += machines.back().gpus.size();
      nodes += machines.back().numa_nodes.size();
    }
    const bool slots_said = !gathered.slots.empty() && std::count(gathered.slots.begin(), gathered.slots.end(), 0) == 0;
    if (!ranks_ && slots_said) ranks_ = std::accumulate(gathered.slots.begin(), gathered.slots.end(), int64_t{0});
    // If cuda is requested and there are too few GPUs, `place` throws.
    const DeviceKind device = device_ == "cuda"
                                  ? DeviceKind::kCuda
                                  : device_for(hosts, machines, static_cast<int>(ranks_.value_or(1)), device_);
    const auto ranks = static_cast<int>(
        ranks_.value_or(static_cast<int64_t>(device == DeviceKind::kCuda ? std::max<size_t>(1, gpus) : nodes)));
    const Placement placement =
        place(machines, ranks, {.device = device, .context = static_cast<int>(context_), .slots = gathered.slots});
    std::string text;
    if (json_) {
      nlohmann::json json = topology_json(hosts, placement);
      json["network"] = network;
      text = json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
    } else {
      text = topology_table(machines, placement) + network_text(hosts, network);
    }
    std::fputs(text.c_str(), stdout);
    if (!svg_.empty()) write_atomically(FileSystem::real(), svg_, topology_svg(machines, placement));
    return 0;
  }

 private:
  // One element per host in each vector.
  struct Gathered {
    std::vector<Host> hosts;
    std::vector<Environment> environments;
    std::vector<int> slots;
  };

  Gathered gather() const {
    Gathered all;
    if (const auto list = load_.empty() && xml_.empty() ? hosts_of_options(hosts_, hostfile_) : std::nullopt) {
      for (const HostSlots& host : list->hosts) all.slots.push_back(host.slots);
      if (list->hosts.size() > 1 || !is_this_host(list->hosts.front().name)) return ask(*list, std::move(all));
    }
    if (!load_.empty()) all.hosts = read_cluster(load_);
    for (const std::string& file : xml_) all.hosts.push_back({Machine::from_xml(file), /*cuda=*/true});
    all.environments.resize(all.hosts.size());
    if (all.hosts.empty()) {
      all.hosts.push_back(this_host());
      all.environments.push_back(network_environment());
    }
    return all;
  }

  Gathered ask(const HostList& list, Gathered all) const {
    LauncherSocket socket(listen_tcp(network_.interfaces), list.hosts.size());
    for (HostReport& report : discover_hosts({.hosts = list, .interfaces = network_.interfaces}, socket)) {
      all.hosts.push_back(std::move(report.host));
      all.environments.push_back(std::move(report.environment));
    }
    return all;
  }

  std::vector<std::string> xml_;
  std::optional<std::string> hosts_, hostfile_;
  std::string load_, save_, svg_;
  std::optional<int64_t> ranks_;
  int64_t context_ = 0;
  std::string device_ = "auto";
  std::string hcas_, interfaces_;
  Network network_;
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Subcommand> make_topology_subcommand() { return std::make_unique<TopologySubcommand>(); }

}  // namespace annulus
