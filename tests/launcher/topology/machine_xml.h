// Writes hwloc XML of made-up machines, so that the tests of topology read them with the same code as a file from
// lstopo.
#pragma once

#include <string>
#include <vector>

namespace annulus::testing {

struct MadeUpMachine {
  int packages = 1;
  int nodes_per_package = 1;
  int cores_per_node = 4;
  int threads_per_core = 1;
  // The number of GPUs of each package; a package that is not listed has none. Two GPUs share a PCI switch.
  std::vector<int> gpus;
  int nics_per_package = 0;
};

// Processors are numbered as Linux does: the first threads of all cores, then the second threads.
std::string to_xml(const MadeUpMachine& machine);

}  // namespace annulus::testing
