// What the section [memory] of a configuration says about offload (memory/tiers/offload.h). Used by training.cc, the
// memory plan and fitting.cc. Thread safety: functions without state.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "comm/communicator.h"
#include "memory/tiers/offload.h"
#include "runtime/config/config.h"

namespace annulus {

// Returns the number of layers, the first ones, whose kept tensors are offloaded.
int64_t offloaded_layers(const Config& config);
// Whether some of them go to files.
bool offloads_to_files(const Config& config);
// Returns the folder of these files; makes it if it is that of the runs, which the first run makes.
std::string offload_folder(const Config& config);
// Returns what this rank offloads with; null if it offloads nothing. Each rank may take its share of memory.host.
// Raises Error(kUsage) for "host" on a CPU, and what TierFile::in_folder raises.
std::unique_ptr<Offload> make_offload(const Config& config, const Communicator& world, at::Device device);

}  // namespace annulus
