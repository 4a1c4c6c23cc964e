// Makes a Machine from a topology loaded by hwloc. Internal to launcher/topology: machine_sources.cc loads topologies,
// and machine.cc derives the links again when GPUs change.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "launcher/topology/cpu_set.h"
#include "launcher/topology/machine.h"

struct hwloc_topology;

namespace annulus {

struct HwlocTopologyDeleter {
  void operator()(hwloc_topology* topology) const;
};
using HwlocTopology = std::unique_ptr<hwloc_topology, HwlocTopologyDeleter>;

// Returns a topology that is configured to find devices, but not yet loaded. Raises Error(kResource).
HwlocTopology init_hwloc();

// Converts a loaded topology, restricted to the processors `only` (nullopt: all). `source` names the topology in
// errors. Raises Error(kInput) if the topology does not describe a machine.
Machine read_machine(hwloc_topology* topology, const std::string& source, std::optional<CpuSet> only);

// Derives machine.links from the PCI tree alone.
void derive_links(Machine& machine);

}  // namespace annulus
