// Makes a Machine from a topology that hwloc has loaded. Only this package uses it: machine_sources.cc loads
// topologies, and machine.cc derives the links again after the GPUs have changed.
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

// Returns a topology that is configured to find devices and not loaded yet. Throws Error(kResource).
HwlocTopology init_hwloc();

// `only` are the processors to keep; nothing keeps all. `source` names the topology in errors. Throws Error(kInput) if
// the topology does not describe a machine.
Machine read_machine(hwloc_topology* topology, const std::string& source, std::optional<CpuSet> only);

// Sets machine.links from the PCI tree alone.
void derive_links(Machine& machine);

}  // namespace annulus
