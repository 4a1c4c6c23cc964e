// Reads RDMA devices and their ports from /sys/class/infiniband, because hwloc reports only some of them or none. Used
// by host.cc; tests pass their own folder. It has not run on a machine with an RDMA device.
//
// Thread safety: a function without state.
#pragma once

#include <string>

#include "launcher/topology/machine.h"

namespace annulus {

// Adds the state, rate and link layer of each port to the NICs of a machine of this system. A device that is not among
// the NICs is merged with the network interface on the same PCI device, or becomes a new NIC, near the NUMA node that
// the kernel reports, or else near all nodes. Does nothing if the folder does not exist.
void add_rdma(Machine& machine, const std::string& folder = "/sys/class/infiniband");

}  // namespace annulus
