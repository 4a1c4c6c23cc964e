// Measures a machine, as attention/plan/machine.h describes one: the rates of the attention kernel, and the links
// between ranks. `bench calibrate` writes the result, and `bench plan` compares with it. On a CPU all figures are CPU
// seconds of a rank, with all threads that it computes with, because they hardly depend on what else the machine does.
#pragma once

#include <cstdint>
#include <functional>
#include <ostream>
#include <string>

#include "attention/plan/machine.h"
#include "comm/communicator.h"

namespace annulus {

struct CalibrationSettings {
  int64_t head_dim = 64;
  int64_t heads = 4;     // of the tiles that are measured
  double seconds = 0.1;  // of each measurement
};

// Collective over two or more ranks, and the same result on all of them. `cpu_seconds` is the clock of a rank: that of
// its process, or of its thread where ranks are threads. Rank 0 measures kernels, in fp32 and bf16, and then ranks 0
// and 1 their link, by exchanges as the executor makes them, in both directions at once. All ranks are taken to be on
// one host with such links; the profile's `between` is what it was measured as if ranks 0 and 1 are on two hosts.
MachineProfile calibrate(Communicator& world, const CalibrationSettings& settings,
                         const std::function<double()>& cpu_seconds);

}  // namespace annulus
