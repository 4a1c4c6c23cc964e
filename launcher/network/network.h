// The job's network: which interfaces and which RDMA devices (HCAs) its ranks use, said to NCCL and to MPI in the form
// that each takes. A rank applies it before MPI starts and before it touches NCCL (seats.h); `launch` hands it to
// mpirun's own daemons too (launcher/hosts/mpirun.h).
//
// Thread safety: apply_network and apply_for_nccl change the environment: the first belongs before the first thread,
// the second where no other thread reads it. The others have no state.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace annulus {

// Nothing named: NCCL and MPI choose for themselves.
struct Network {
  std::vector<std::string> interfaces = {};  // IP interfaces, "eth0"
  std::vector<std::string> hcas = {};        // "mlx5_0", or "mlx5_0:1" for one port of it
  // False: NCCL and MPI choose each rank's HCA, among `hcas` where there are some. True: each rank is given the nearest
  // by the topology.
  bool nearest_hca = false;

  bool operator==(const Network&) const = default;
};

// From lists with commas, "" for none, and "auto" or "nearest", as a configuration and `launch` give them. Raises
// Error(kUsage), naming `where`, for what is no name of an interface or HCA: "=eth0", "^mlx5", "10.0.0.0/8".
Network parse_network(std::string_view interfaces, std::string_view hcas, std::string_view rank_hca,
                      std::string_view where);

// What the environment says where a configuration does not reach, set by `launch --interfaces --hcas --rank-hca`:
// ANNULUS_INTERFACES and ANNULUS_HCAS, lists with commas, and ANNULUS_RANK_HCA, "auto" or "nearest". What is not set is
// taken from `configured`. Raises Error(kUsage).
Network network_from_environment(Network configured);

// How `launch` says it to its ranks: variables for the above, those that are named.
struct Variable {
  std::string name;
  std::string value;
  bool operator==(const Variable&) const = default;
};
std::vector<Variable> environment_of(const Network& network);

// What NCCL and MPI are told. `nearest`: the rank's own HCA, "mlx5_0" or "mlx5_0:1", empty where it has none; used
// where nearest_hca asks for it.
//   NCCL_SOCKET_IFNAME              "=eth0,eth1": with "=" names are names, not beginnings of names
//   NCCL_IB_HCA                     "=mlx5_0:1,mlx5_1": likewise; without a port, all of them
//   OMPI_MCA_btl_tcp_if_include     "eth0,eth1"
//   OMPI_MCA_btl_openib_if_include  "mlx5_0:1,mlx5_1"
//   UCX_NET_DEVICES                 "mlx5_0:1,mlx5_1:1,eth0,eth1": RDMA and IP in one list, a port always; set where
//   HCAs are
//                                   named, since it would take the others away
// Sources: NCCL's documentation of its environment variables, `ompi_info --all`, UCX's frequently asked questions.
std::vector<Variable> network_variables(const Network& network, const std::string& nearest);

struct Applied {
  std::vector<std::string> lines = {};  // what was set and what was left
  std::vector<Variable> set = {};       // by us
};

// Sets the variables that are not set: what the user has set is meant. A variable is also left where its opposite is
// set (btl_tcp_if_exclude), since MPI refuses both.
Applied apply_network(const std::vector<Variable>& variables);

// After MPI has started, and before NCCL is first used: NCCL's variables are taken back where we set them, and set as
// in `variables`. MPI's stay: it has read them.
void apply_for_nccl(const std::vector<Variable>& variables, Applied& applied);

}  // namespace annulus
