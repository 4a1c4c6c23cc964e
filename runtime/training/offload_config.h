// What a configuration says about offload: of what layers keep (memory.offload; memory/tiers/offload.h) and of the
// optimizer's state (optimizer.offload; memory/tiers/tiered_tensors.h). Used by training.cc, job.cc, the memory plan
// and fitting.cc. Thread safety: functions without state.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "comm/communicator.h"
#include "memory/tiers/offload.h"
#include "memory/tiers/tiered_tensors.h"
#include "runtime/config/config.h"
#include "runtime/training/state/state_tier.h"

namespace annulus {

// Returns the number of layers, the first ones, whose kept tensors are offloaded.
int64_t offloaded_layers(const Config& config);
// Whether some of them go to files.
bool offloads_to_files(const Config& config);
// Returns the number of files of a rank, of layers and of the optimizer.
int64_t offloaded_files(const Config& config);
// Returns the folder of these files; makes it if it is that of the runs, which the first run makes.
std::string offload_folder(const Config& config);
// Returns the keys that offload something, joined by "and": "memory.offload".
std::string offload_keys(const Config& config);
// Raises Error(kUsage) if one of them is "host". `where` says what computes on a CPU.
void require_no_host(const Config& config, const std::string& where);
// Returns what this rank offloads what layers keep with; null if it offloads nothing. Each rank may take its share of
// memory.host, of which the optimizer's state has already taken `taken` bytes. Raises Error(kUsage) for "host" on a
// CPU, and what TierFile::in_folder raises.
std::unique_ptr<Offload> make_offload(const Config& config, const Communicator& world, at::Device device,
                                      int64_t taken);
// Returns where the optimizer's state of this rank lies; optimizer.offload is not "none". Raises as make_offload does,
// and Error(kResource) if the disk has no room for it.
std::unique_ptr<TieredTensors> make_optimizer_tier(const Config& config, const StateTier& state,
                                                   const TieredTensors::Settings& settings);

}  // namespace annulus
