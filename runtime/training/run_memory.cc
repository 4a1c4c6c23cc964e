// See run_memory.h.
#include "runtime/training/run_memory.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <string>
#include <system_error>
#include <utility>

#include "comm/agreement.h"
#include "common/environment.h"
#include "common/text.h"
#include "memory/device_memory.h"
#include "memory/tiers/tier_file.h"
#include "runtime/training/fitting.h"

namespace annulus {
namespace {

// What this host has for what leaves the devices. A folder that is to be made is one of the disk of its parent.
void bound_tiers(const Config& config, FitRanks& ranks) {
  const std::optional<AvailableMemory> memory = available_memory();
  if (memory) ranks.host_memory = static_cast<double>(memory->bytes);
  std::error_code error;
  std::filesystem::path folder =
      std::filesystem::absolute(config.memory.files.empty() ? config.run.folder : config.memory.files, error);
  while (!std::filesystem::is_directory(folder, error) && folder.has_relative_path()) folder = folder.parent_path();
  int64_t files = free_bytes_in(folder, "memory.files");
  if (memory && lies_in_memory(folder)) files = std::min(files, memory->bytes);
  ranks.files = static_cast<double>(files);
}

}  // namespace

std::optional<double> most_lacking(Communicator& world, OpLabel label,
                                   const std::function<std::optional<int64_t>()>& here) {
  constexpr int64_t kUnknown = std::numeric_limits<int64_t>::max();
  int64_t most = std::numeric_limits<int64_t>::min();
  for (const Terms::Numbers& of : agree_together(world, label, [&]() -> Terms {
         return {{}, {here().value_or(kUnknown)}};
       })) {
    most = std::max(most, of[0]);
  }
  return most == kUnknown ? std::nullopt : std::optional(static_cast<double>(most));
}

namespace {

// What this rank is to be planned for, and what it has; `free` becomes what its host or GPU has.
FitRanks ranks_of(const Config& config, const Communicator& world, const RunDevice& on,
                  std::optional<AvailableMemory>& free) {
  const bool gpu = on.device.is_cuda();
  FitRanks here{.ranks = world.size(),
                .ranks_of_a_host = on.ranks_here,
                .are = gpu ? RanksAre::kGpus : RanksAre::kProcesses,
                .memory = kAnyMachine,
                .planned = world.rank() % (world.size() / static_cast<int>(config.mesh.data))};
  free = on.available ? on.available() : available_memory(on.device);
  if (free) here.memory = static_cast<double>(free->bytes) / (gpu ? 1 : on.ranks_here);
  return here;
}

std::string nearest_text(const Config& config, FitRanks here) {
  bound_tiers(config, here);
  return nearest_fit(config, here).text;
}

}  // namespace

void require_least_memory(const Config& config, const Sharding& sharding, Communicator& world, const RunDevice& on) {
  together(world, {"planning the memory"}, [&] {
    std::optional<AvailableMemory> free;
    const FitRanks here = ranks_of(config, world, on, free);
    require_memory("at least ", least_memory(config, sharding, world.size() / static_cast<int>(config.mesh.data)),
                   on.device.is_cuda() ? 1 : on.ranks_here, free, [&] { return nearest_text(config, here); });
  });
}

RunMemory require_memory_for(const Config& config, std::vector<Stage>& stages, const Sharding& sharding,
                             Communicator& world, const RunDevice& on, const std::string& recorded,
                             const std::function<void(std::string_view)>& say) {
  const OpLabel label{"planning the memory"};
  const bool gpu = on.device.is_cuda();
  const RanksAre are = gpu ? RanksAre::kGpus : RanksAre::kProcesses;
  const int context = world.size() / static_cast<int>(config.mesh.data), ranks = gpu ? 1 : on.ranks_here;
  const int rank = world.rank() % context;
  require_least_memory(config, sharding, world, on);
  MemoryPlan plan;
  std::optional<AvailableMemory> free;
  FitRanks here;
  const auto nearest = [&] { return nearest_text(config, here); };
  together(world, label, [&] {
    here = ranks_of(config, world, on, free);
    if (config.memory.offload != "none" || config.optimizer.offload != "none") bound_tiers(config, here);
  });
  const bool known = free && switch_from_environment("ANNULUS_MEMORY_CHECK", true);
  // All rings choose by the hosts of the first one, and so alike.
  const RunChoice choice = choose_for_run(
      stages, config, gpu ? "cuda" : "cpu", world.hosts().first(context),
      [&](const std::vector<Stage>& tried) -> std::optional<double> {
        return most_lacking(world, label, [&]() -> std::optional<int64_t> {
          if (!known) return std::nullopt;
          return lacking(config, plan_memory(config, tried, sharding, context, rank, are), here);
        });
      },
      recorded);
  if (!choice.warning.empty()) say(choice.warning);
  for (const std::string& line : choice.lines) say(line);
  together(world, label, [&] { plan = plan_memory(config, stages, sharding, context, rank, are); });
  let_calls_choose(stages, config);
  const std::vector<Terms::Numbers> fit = agree_together(world, label, [&]() -> Terms {
    const OffloadPlan offload = plan_offload(config, plan, on.ranks_here, are);
    return {{}, {save_copy_fits(plan, offload, on.ranks_here, are, gpu ? available_memory() : free) ? 1 : 0}};
  });
  const bool copies_fit = std::all_of(fit.begin(), fit.end(), [](const Terms::Numbers& of) { return of[0] == 1; });
  const int64_t copy = plan.save_copy;
  if (!copies_fit) plan.save_copy = 0;
  say("memory: " + plan.text());
  together(world, label, [&] {
    require_memory("", static_cast<double>(plan.total()), ranks, free, nearest);
    require_offload(config, plan_offload(config, plan, on.ranks_here, are), on.ranks_here, nearest);
  });
  if (!copies_fit) {
    say("training waits while a checkpoint is written: the " + bytes_text(static_cast<double>(copy)) +
        " that checkpoint.background would copy for each rank are not free");
  }
  return {std::move(plan), copies_fit, choice.record};
}

}  // namespace annulus
