// Draws a placement: hosts with their packages, NUMA nodes, GPUs and NICs, the ranks on them, and the rings in color,
// also between hosts. Used by `topology --svg`.
//
// Thread safety: a function without state.
#pragma once

#include <string>
#include <vector>

#include "launcher/topology/machine.h"
#include "launcher/topology/placement.h"

namespace annulus {

// Returns SVG 1.1 without scripts, fonts or links. `hosts` are those given to `place`, for a whole job. Up to 4 hosts
// are drawn with text, and up to 64 in a compact form; of more hosts, only the first 64 and the hops among them. Names
// are truncated to fit. The picture is light, and dark for a reader who prefers that.
std::string topology_svg(const std::vector<Machine>& hosts, const Placement& placement);

}  // namespace annulus
