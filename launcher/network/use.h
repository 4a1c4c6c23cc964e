// Which interfaces and RDMA devices each library will really use on a host: by the job's network (network.h), by the
// variables that are set there, and else by the library's own rules. `topology` shows it.
//
// Thread safety: a function without state.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "launcher/network/network.h"
#include "topology/host.h"

namespace annulus {

struct NetworkUse {
  std::string user;                  // "mpirun's daemons", "MPI", "NCCL"
  std::vector<std::string> devices;  // "eth0", "mlx5_0:1"; empty: none that would do
  std::string how;                   // "TCP", "RDMA (UCX, or verbs in Open MPI 4)"
  std::string why;                   // "all that are up", "NCCL_SOCKET_IFNAME=eth"
  bool operator==(const NetworkUse&) const = default;
};

// Between hosts; on one host MPI uses shared memory, and NCCL NVLink, PCI and shared memory. NCCL is left out where
// ranks cannot compute on GPUs. `environment`: the variables that are set on the host, at least those of
// is_network_variable.
// Sources: NCCL's socket.cc and net_ib (the order "ib", neither docker nor lo nor virbr, docker, lo, virbr; lists
// with "^" and "="), Open MPI's `ompi_info --all` (btl_tcp_if_exclude's default takes away loopback alone), UCX's
// frequently asked questions.
std::vector<NetworkUse> network_use(const Host& host, const Network& network,
                                    const std::map<std::string, std::string>& environment);

// Whether a variable is one by which a user tells NCCL, UCX, MPI or mpirun's daemons how they shall send. Those by
// which an mpirun tells its ranks what they are (OMPI_MCA_ess, ...) are none. Also for reports of hosts
// (launcher/hosts/host_facts.h).
bool is_network_variable(std::string_view name);

// Those of this process, for this host.
std::map<std::string, std::string> network_environment();

}  // namespace annulus
