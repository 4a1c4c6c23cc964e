// From a topology that hwloc has loaded to a Machine. Within this room only: machine_sources.cc loads, machine.cc
// derives links again for other GPUs.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "topology/cpu_set.h"
#include "topology/machine.h"

struct hwloc_topology;

namespace annulus {

struct HwlocTopologyDeleter {
  void operator()(hwloc_topology* topology) const;
};
using HwlocTopology = std::unique_ptr<hwloc_topology, HwlocTopologyDeleter>;

// A topology that is not loaded yet, set to find devices. Error(kResource).
HwlocTopology init_hwloc();

// `only`: processors to keep; all where it is nothing. `source` names the topology in errors. Error(kInput) where it is
// no machine.
Machine read_machine(hwloc_topology* topology, const std::string& source, std::optional<CpuSet> only);

// machine.links from the PCI tree alone.
void derive_links(Machine& machine);

}  // namespace annulus
