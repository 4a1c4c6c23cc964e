// Reads RDMA devices and their ports from the kernel (/sys/class/infiniband), of which hwloc shows only a part or
// nothing. host.cc uses it; tests give it a folder of their own. It has not run on a machine with an RDMA device.
//
// Thread safety: a function without state.
#pragma once

#include <string>

#include "launcher/topology/machine.h"

namespace annulus {

// Completes the NICs of a machine of this system with the state, rate and link layer of each port. A device that is not
// among the NICs completes the network interface on the same PCI device, or is added as a new NIC, which is near the
// NUMA node that the kernel names, or near all nodes if it names none. If the folder does not exist, nothing changes.
void add_rdma(Machine& machine, const std::string& folder = "/sys/class/infiniband");

}  // namespace annulus
