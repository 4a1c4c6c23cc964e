// See use.h.
#include "launcher/network/use.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <functional>
#include <string_view>
#include <utility>

#include "common/text.h"

namespace annulus {
namespace {

using Names = std::vector<std::string>;

// The variables that a process on the host has: those of the environment, and those that annulus would set.
class Settings {
 public:
  Settings(const Network& network, const std::map<std::string, std::string>& environment) : all_(environment) {
    for (const Variable& variable : network_variables(network, "")) {
      if (get(variable.name).empty()) {
        all_[variable.name] = variable.value;
        ours_[variable.name] = true;
      }
    }
  }

  std::string get(const std::string& name) const {
    const auto found = all_.find(name);
    return found == all_.end() ? "" : found->second;
  }
  std::string why(const std::string& name) const {
    return ours_.contains(name) ? "named for the job" : name + "=" + get(name);
  }

 private:
  std::map<std::string, std::string> all_;
  std::map<std::string, bool> ours_;
};

// Whether NCCL's list names the device: "eth,ib" means names that begin so, "=eth0" exactly these names, and "^docker"
// all others. In "mlx5_0:1", the number after the colon is a port.
bool nccl_matches(std::string_view list, std::string_view name, int port) {
  const bool except = list.starts_with("^");
  if (except) list.remove_prefix(1);
  const bool whole = list.starts_with("=");
  if (whole) list.remove_prefix(1);
  for (const std::string& item : split(list, ',')) {
    const std::string_view wanted = std::string_view(item).substr(0, item.find(':'));
    const bool named = whole ? name == wanted : name.starts_with(wanted) && !wanted.empty();
    const bool of_port =
        port == 0 || item.find(':') == std::string::npos || item.substr(item.find(':') + 1) == std::to_string(port);
    if (named && of_port) return !except;
  }
  return except;
}

Names usable(const Host& host, const std::function<bool(const NetInterface&)>& taken) {
  Names names;
  for (const NetInterface& interface : host.interfaces) {
    if (interface.up && !interface.addresses.empty() && taken(interface)) names.push_back(interface.name);
  }
  return names;
}

// Applies Open MPI's lists. They hold names of interfaces, and networks such as 10.0.0.0/8, which are returned as they
// are.
NetworkUse by_open_mpi(const Host& host, const Settings& settings, const char* user, const Names& includes,
                       const Names& excludes) {
  NetworkUse use{user, {}, "TCP", ""};
  for (const std::string& name : includes) {
    if (settings.get(name).empty()) continue;
    use.why = settings.why(name);
    const Names list = split(settings.get(name), ',');
    use.devices = usable(host, [&](const NetInterface& interface) {
      return std::find(list.begin(), list.end(), interface.name) != list.end();
    });
    for (const std::string& item : list) {
      if (item.find('/') != std::string::npos) use.devices.push_back(item);
    }
    return use;
  }
  for (const std::string& name : excludes) {
    if (settings.get(name).empty()) continue;
    use.why = settings.why(name);
    const Names list = split(settings.get(name), ',');
    use.devices = usable(host, [&](const NetInterface& interface) {
      return std::find(list.begin(), list.end(), interface.name) == list.end();
    });
    return use;
  }
  use.why = "all that are up";
  use.devices = usable(host, [](const NetInterface& interface) { return !interface.loopback; });
  return use;
}

// The device and number of every RDMA port that is up.
std::vector<std::pair<const Nic*, int>> active_ports(const Host& host) {
  std::vector<std::pair<const Nic*, int>> ports;
  for (const Nic& nic : host.machine.nics) {
    if (!nic.rdma || !nic.active) continue;
    if (nic.ports.empty()) ports.emplace_back(&nic, std::max(1, nic.port));
    for (const RdmaPort& port : nic.ports) {
      if (port.active) ports.emplace_back(&nic, port.number);
    }
  }
  return ports;
}

Names port_names(const Host& host, const std::function<bool(const std::string&, int)>& taken) {
  Names names;
  for (const auto& [nic, port] : active_ports(host)) {
    if (taken(nic->name, port)) names.push_back(nic->name + ":" + std::to_string(port));
  }
  return names;
}

NetworkUse mpi(const Host& host, const Settings& settings) {
  const std::string pml = settings.get("OMPI_MCA_pml"), btl = settings.get("OMPI_MCA_btl");
  NetworkUse rdma{"MPI", {}, "RDMA (UCX, or verbs in Open MPI 4)", "active ports"};
  const Names list = split(settings.get("UCX_NET_DEVICES"), ',');
  const bool all = list.front().empty() || list.front() == "all";
  if (!all) rdma.why = settings.why("UCX_NET_DEVICES");
  rdma.devices = port_names(host, [&](const std::string& name, int port) {
    return all || std::find(list.begin(), list.end(), name + ":" + std::to_string(port)) != list.end();
  });
  // With these settings, MPI uses the named components, none of which uses RDMA.
  const bool without = (!pml.empty() && pml != "ucx") || (!btl.empty() && !btl.starts_with("^") && pml != "ucx" &&
                                                          btl.find("openib") == std::string::npos);
  if (!rdma.devices.empty() && !without) return rdma;
  NetworkUse tcp = by_open_mpi(host, settings, "MPI", {"OMPI_MCA_btl_tcp_if_include"}, {"OMPI_MCA_btl_tcp_if_exclude"});
  if (!rdma.devices.empty()) tcp.why += !pml.empty() ? ", OMPI_MCA_pml=" + pml : ", OMPI_MCA_btl=" + btl;
  return tcp;
}

// The sockets with which NCCL connects its ranks, and which carry data if there is no RDMA.
NetworkUse nccl_sockets(const Host& host, const Settings& settings) {
  NetworkUse use{"NCCL", {}, "sockets", ""};
  if (const std::string list = settings.get("NCCL_SOCKET_IFNAME"); list.size() > 1) {
    use.why = settings.why("NCCL_SOCKET_IFNAME");
    use.devices = usable(host, [&](const NetInterface& interface) { return nccl_matches(list, interface.name, 0); });
    return use;
  }
  use.why = "its own choice";
  for (const char* list : {"ib", "^docker,lo,virbr", "docker", "lo", "virbr"}) {
    use.devices = usable(host, [&](const NetInterface& interface) { return nccl_matches(list, interface.name, 0); });
    if (!use.devices.empty()) break;
  }
  return use;
}

}  // namespace

std::vector<NetworkUse> network_use(const Host& host, const Network& network,
                                    const std::map<std::string, std::string>& environment) {
  const Settings settings(network, environment);
  std::vector<NetworkUse> uses;
  if (const Names& named = network.interfaces; !named.empty()) {
    uses.push_back({"mpirun's daemons",
                    usable(host,
                           [&](const NetInterface& interface) {
                             return std::find(named.begin(), named.end(), interface.name) != named.end();
                           }),
                    "TCP", "named for the job"});
  } else {
    uses.push_back(by_open_mpi(host, settings, "mpirun's daemons",
                               {"OMPI_MCA_oob_tcp_if_include", "PRTE_MCA_prte_if_include"},
                               {"OMPI_MCA_oob_tcp_if_exclude", "PRTE_MCA_prte_if_exclude"}));
  }
  uses.push_back(mpi(host, settings));
  if (!host.cuda || host.machine.gpus.empty()) return uses;
  const NetworkUse sockets = nccl_sockets(host, settings);
  const std::string list = settings.get("NCCL_IB_HCA");
  NetworkUse rdma{"NCCL",
                  {},
                  "RDMA, each GPU the nearest; connecting over " + join(sockets.devices, " "),
                  list.empty() ? "active ports" : settings.why("NCCL_IB_HCA")};
  rdma.devices = port_names(
      host, [&](const std::string& name, int port) { return list.empty() || nccl_matches(list, name, port); });
  const std::string off = settings.get("NCCL_IB_DISABLE");
  const bool sockets_only = settings.get("NCCL_NET") == "Socket" || (!off.empty() && off != "0");
  uses.push_back(rdma.devices.empty() || sockets_only ? sockets : rdma);
  return uses;
}

bool is_network_variable(std::string_view name) {
  constexpr std::array<std::string_view, 11> kBegin = {
      "NCCL_",         "UCX_",         "OMPI_MCA_btl",  "OMPI_MCA_pml", "OMPI_MCA_mtl",     "OMPI_MCA_oob",
      "OMPI_MCA_coll", "OMPI_MCA_osc", "OMPI_MCA_opal", "PRTE_MCA_oob", "PRTE_MCA_prte_if_"};
  return std::any_of(kBegin.begin(), kBegin.end(), [&](std::string_view begin) { return name.starts_with(begin); });
}

std::map<std::string, std::string> network_environment() {
  std::map<std::string, std::string> found;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const size_t equals = text.find('=');
    if (equals == std::string_view::npos || !is_network_variable(text.substr(0, equals))) continue;
    found.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return found;
}

}  // namespace annulus
