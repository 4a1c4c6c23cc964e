// Predicts which interfaces and RDMA devices each library will use on a host, from the job's network (network.h), the
// variables that are set there, and the library's own rules. `topology` shows it; reports of hosts use
// is_network_variable. What it says about NCCL and RDMA follows their sources and has not been compared with hardware.
//
// Thread safe: functions without state.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "launcher/network/network.h"
#include "launcher/topology/host.h"

namespace annulus {

struct NetworkUse {
  std::string user;                  // "mpirun's daemons", "MPI", "NCCL"
  std::vector<std::string> devices;  // "eth0", "mlx5_0:1"; empty: there is no suitable one
  std::string how;                   // "TCP", "RDMA (UCX, or verbs in Open MPI 4)"
  std::string why;                   // "all that are up", "NCCL_SOCKET_IFNAME=eth"
  bool operator==(const NetworkUse&) const = default;
};

// Returns what the libraries use between hosts. (Inside a host, MPI uses shared memory, and NCCL uses NVLink, PCI and
// shared memory.) NCCL is left out if ranks cannot compute on GPUs. `environment` holds the variables that are set on
// the host, at least those for which is_network_variable is true.
// Sources: NCCL's socket.cc and net_ib (the order is ib; anything but docker, lo and virbr; docker; lo; virbr; lists
// with "^" and "="), Open MPI's `ompi_info --all` (the default of btl_tcp_if_exclude excludes only the loopback), and
// UCX's frequently asked questions.
std::vector<NetworkUse> network_use(const Host& host, const Network& network,
                                    const std::map<std::string, std::string>& environment);

// Whether this is a variable with which a user configures how NCCL, UCX, MPI or mpirun's daemons communicate. Variables
// with which mpirun identifies its ranks (OMPI_MCA_ess, ...) are not.
bool is_network_variable(std::string_view name);

// The variables of this process for which is_network_variable is true.
std::map<std::string, std::string> network_environment();

}  // namespace annulus
