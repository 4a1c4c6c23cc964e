// Plans the memory of a run on all its ranks, lets its attention have the schedules that are fastest with it, says how
// much it is, and refuses a run that does not fit, before any of it is taken. Used by trainer.cc.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.h"
#include "memory/available.h"
#include "runtime/config/config.h"
#include "runtime/training/layer_requests.h"
#include "runtime/training/memory_plan.h"
#include "runtime/training/state/sharding.h"

namespace annulus {

struct RunDevice {
  at::Device device = at::kCPU;
  int ranks_here = 1;  // the ranks of this host
  // Returns what is available for the tensors of all ranks of this host, or on a GPU of this rank; null: it is queried.
  std::function<std::optional<AvailableMemory>()> available;
};

// Collective. Raises Error(kResource) on all ranks if not even a lower bound of what the run takes (least_memory) is
// free. It takes no time, so a resume is refused before its checkpoint is read.
void require_least_memory(const Config& config, const Sharding& sharding, Communicator& world, const RunDevice& on);

struct RunMemory {
  MemoryPlan plan;         // save_copy is 0 if it does not fit
  bool copies_fit = true;  // whether what checkpoint.background copies is free on all ranks
  std::string attention;   // RunChoice::record
};

// Collective. Returns the most bytes that a rank lacks, as choose_for_run takes it, from what `here` returns on each of
// them. Nothing if one of them does not know. Raises what `here` raises on any rank, on all.
std::optional<double> most_lacking(Communicator& world, OpLabel label,
                                   const std::function<std::optional<int64_t>()>& here);

// Collective. Lets `auto` choose for `stages`, the result of check_training, among what fits on all ranks with all that
// the plan names, also what caches and pool may hold, and the copies of a checkpoint (choose_for_run).
// `recorded` is RunMemory::attention of the run that is resumed, or empty. `say` gets lines for the user. Raises
// Error(kResource) on all ranks if the run itself does not fit: on a host with too little memory the kernel would kill
// some process without a message.
RunMemory require_memory_for(const Config& config, std::vector<Stage>& stages, const Sharding& sharding,
                             Communicator& world, const RunDevice& on, const std::string& recorded,
                             const std::function<void(std::string_view)>& say);

}  // namespace annulus
