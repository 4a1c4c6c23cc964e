// A placement as a picture: hosts with their packages, NUMA nodes, GPUs and NICs, the ranks on them, and the rings in
// colour, also from host to host. `topology --svg` writes it.
//
// Thread safety: a function without state.
#pragma once

#include <string>
#include <vector>

#include "topology/machine.h"
#include "topology/placement.h"

namespace annulus {

// SVG 1.1 without scripts, fonts or links. `hosts` as given to `place`, of a whole job. Up to 4 hosts are drawn with
// words, up to 64 small ones; of more, the first 64 with what happens among them. Names are shortened to fit.
std::string topology_svg(const std::vector<Machine>& hosts, const Placement& placement);

}  // namespace annulus
