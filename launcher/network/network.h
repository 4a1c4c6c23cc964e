// The job's network: the interfaces and RDMA devices (HCAs) that its ranks use, and the environment variables that tell
// NCCL and MPI. A rank applies them before MPI starts and before it uses NCCL (rank_locations.h). `launch` also passes
// the interfaces to mpirun's own daemons (launcher/hosts/mpirun.h). What concerns NCCL and RDMA has not run on
// hardware.
//
// Thread safety: apply_network and apply_for_nccl change the environment. Call the first before any thread starts, and
// the second while no other thread reads the environment. The other functions have no state.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace annulus {

// If the lists are empty, NCCL and MPI choose for themselves.
struct Network {
  std::vector<std::string> interfaces = {};  // IP interfaces, "eth0"
  std::vector<std::string> hcas = {};        // "mlx5_0", or "mlx5_0:1" for one of its ports
  // False: NCCL and MPI choose the HCA of each rank, from `hcas` if that is not empty. True: each rank uses its nearest
  // HCA by the topology.
  bool nearest_hca = false;

  bool operator==(const Network&) const = default;
};

// Parses comma-separated lists ("" for none) and "auto" or "nearest", as a configuration and `launch` give them. Throws
// Error(kUsage), which names `where`, for anything but the name of an interface or HCA: "=eth0", "^mlx5", "10.0.0.0/8".
Network parse_network(std::string_view interfaces, std::string_view hcas, std::string_view rank_hca,
                      std::string_view where);

// The network from the environment, which `launch --interfaces --hcas --rank-hca` sets: ANNULUS_INTERFACES and
// ANNULUS_HCAS (comma-separated lists) and ANNULUS_RANK_HCA ("auto" or "nearest"). For variables that are not set, the
// values of `configured` are used. Throws Error(kUsage).
Network network_from_environment(Network configured);

// The variables with which `launch` passes `network` to its ranks; values that are not given have none.
struct Variable {
  std::string name;
  std::string value;
  bool operator==(const Variable&) const = default;
};
std::vector<Variable> environment_of(const Network& network);

// The variables of NCCL and MPI. `nearest` is the rank's nearest HCA, "mlx5_0" or "mlx5_0:1", or "" if there is none;
// it is used if nearest_hca is true.
//   NCCL_SOCKET_IFNAME              "=eth0,eth1"; without "=", NCCL would take names as beginnings of names
//   NCCL_IB_HCA                     "=mlx5_0:1,mlx5_1"; likewise; an HCA without a port means all of its ports
//   OMPI_MCA_btl_tcp_if_include     "eth0,eth1"
//   OMPI_MCA_btl_openib_if_include  "mlx5_0:1,mlx5_1"
//   UCX_NET_DEVICES                 "mlx5_0:1,mlx5_1:1,eth0,eth1"; RDMA and IP devices in one list, always with a port;
//                                   set only if HCAs are named, because it excludes all other devices
// Sources: NCCL's documentation of its environment variables, `ompi_info --all`, UCX's frequently asked questions.
std::vector<Variable> network_variables(const Network& network, const std::string& nearest);

struct Applied {
  std::vector<std::string> lines = {};  // lines that say what was set and what was kept
  std::vector<Variable> set = {};       // the variables that annulus set
};

// What annulus sets where the variables of `environment` are set: those of `variables` that are not. A variable is also
// not set if its opposite is (btl_tcp_if_exclude), because MPI refuses both together. Variables with empty values count
// as not set.
Applied settings(const std::vector<Variable>& variables, const std::map<std::string, std::string>& environment);

// Sets those in the environment of this process.
Applied apply_network(const std::vector<Variable>& variables);

// Whether this is a variable with which a user configures how NCCL, UCX, MPI or mpirun's daemons communicate. Variables
// with which mpirun identifies its ranks (OMPI_MCA_ess, ...) are not.
bool is_network_variable(std::string_view name);

// The variables of this process for which is_network_variable is true.
std::map<std::string, std::string> network_environment();

// Call it after MPI has started and before NCCL is first used. Unsets the variables of NCCL that annulus set, and sets
// those in `variables`. Variables of MPI are left as they are, because MPI has already read them.
void apply_for_nccl(const std::vector<Variable>& variables, Applied& applied);

}  // namespace annulus
