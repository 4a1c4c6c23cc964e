// RDMA devices and their ports, as the kernel shows them (/sys/class/infiniband), which hwloc shows in part or not at
// all. Used by host.cc, and by tests with a folder of their own.
//
// Thread safety: a function without state.
#pragma once

#include <string>

#include "topology/machine.h"

namespace annulus {

// Completes the NICs of a machine of this system: each port with its state, rate and link layer. A device that is not
// among the NICs is added to the one on the same PCI device, else as one near all NUMA nodes that the kernel does not
// say otherwise of. Without the folder, nothing changes.
void add_rdma(Machine& machine, const std::string& folder = "/sys/class/infiniband");

}  // namespace annulus
