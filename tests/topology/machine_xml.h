// Writes hwloc XML of made-up machines, so that property tests go through the same reading as a file from lstopo.
#pragma once

#include <string>
#include <vector>

namespace annulus::testing {

struct MadeUpMachine {
  int packages = 1;
  int nodes_per_package = 1;
  int cores_per_node = 4;
  int threads_per_core = 1;
  // GPUs of each package; they hang in pairs on switches. Missing packages have none.
  std::vector<int> gpus;
  int nics_per_package = 0;
};

// Processors are numbered as Linux does it: first threads of all cores, then second threads.
std::string to_xml(const MadeUpMachine& machine);

}  // namespace annulus::testing
