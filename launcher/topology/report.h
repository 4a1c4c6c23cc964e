// Formats machines and placements as tables and as JSON. Used by the subcommand `topology` and `launch --dry-run`.
// Tables of 8 GPUs fit into 120 columns; long names of hosts and models are truncated.
//
// Thread safety: functions without state.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "launcher/topology/host.h"
#include "launcher/topology/machine.h"
#include "launcher/topology/placement.h"

namespace annulus {

// Returns a line about the host, tables of its NUMA nodes, GPUs and NICs, and the matrix of the links between its GPUs
// (up to 16 GPUs).
std::string to_table(const Machine& machine);

// Returns a table with one row for each interface.
std::string to_table(const std::vector<NetInterface>& interfaces);

// Returns a table with one row for each rank, then the rings and their slowest link. `hosts` are those given to
// `place`, for a whole job.
std::string to_table(const std::vector<Machine>& hosts, const Placement& placement);

// Follows the conventions of a cluster file (cluster.h): keys name their units, processors are lists ("0-3,8"), and
// NUMA nodes have the kernel's numbers.
nlohmann::json to_json(const Placement& placement);

// Return the output of the subcommand: each distinct host once, then the placement; as JSON {"hosts": [...],
// "placement":
// {...}}.
std::string topology_table(const std::vector<Machine>& hosts, const Placement& placement);
nlohmann::json topology_json(const std::vector<Host>& hosts, const Placement& placement);

}  // namespace annulus
