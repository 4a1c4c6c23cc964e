// Machines and placements as tables for people and as JSON for programs. The verb `topology` and `launch --dry-run`
// print them. Tables of 8 GPUs fit 120 columns; host names and models are shortened where they are long.
//
// Thread safety: no state.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "topology/host.h"
#include "topology/machine.h"
#include "topology/placement.h"

namespace annulus {

// One line about the host, its NUMA nodes, GPUs, NICs, and the matrix of GPU links (left out above 16 GPUs).
std::string to_table(const Machine& machine);

// One row an interface.
std::string to_table(const std::vector<NetInterface>& interfaces);

// One row a rank, then the rings and their slowest link. `hosts` as given to `place`, of a whole job.
std::string to_table(const std::vector<Machine>& hosts, const Placement& placement);

// As the hosts of a cluster file (cluster.h): units in the keys' names; processors as lists ("0-3,8"); NUMA nodes as
// the system numbers them.
nlohmann::json to_json(const Placement& placement);

// For the verb: each different host once, then the placement; and {"hosts": [...], "placement": {...}}.
std::string topology_table(const std::vector<Machine>& hosts, const Placement& placement);
nlohmann::json topology_json(const std::vector<Host>& hosts, const Placement& placement);

}  // namespace annulus
