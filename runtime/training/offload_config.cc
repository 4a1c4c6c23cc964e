// See offload_config.h.
#include "runtime/training/offload_config.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <system_error>
#include <utility>
#include <vector>

#include "common/error.h"
#include "common/text.h"

namespace annulus {
namespace {

int ranks_here(const Communicator& world) {
  int ranks = 0;
  for (int rank = 0; rank < world.size(); ++rank) ranks += world.hosts().of(rank) == world.hosts().of(world.rank());
  return ranks;
}

}  // namespace

int64_t offloaded_layers(const Config& c) {
  return c.memory.offload == "none" ? 0 : std::max<int64_t>(0, c.model.layers - c.memory.device_layers);
}

bool offloads_to_files(const Config& c) {
  return offloaded_layers(c) > 0 && (c.memory.offload == "file" || !c.memory.host.empty());
}

int64_t offloaded_files(const Config& c) {
  return (offloads_to_files(c) ? 1 : 0) + (c.optimizer.offload == "file" ? 1 : 0);
}

std::string offload_folder(const Config& c) {
  if (!c.memory.files.empty()) return c.memory.files;
  std::error_code error;  // whoever uses the folder says what is wrong with it
  std::filesystem::create_directories(c.run.folder, error);
  return c.run.folder;
}

std::string offload_keys(const Config& c) {
  std::vector<std::string> keys;
  if (c.memory.offload != "none") keys.emplace_back("memory.offload");
  if (c.optimizer.offload != "none") keys.emplace_back("optimizer.offload");
  return join(keys, " and ");
}

void require_no_host(const Config& c, const std::string& where) {
  for (const auto& [key, value] :
       {std::pair{"memory.offload", c.memory.offload}, std::pair{"optimizer.offload", c.optimizer.offload}}) {
    if (value != "host") continue;
    throw Error(ErrorKind::kUsage, "train",
                std::string(key) + " = \"host\" moves tensors from a GPU to its host's memory, and " + where +
                    ": use " + key + " = \"file\"");
  }
}

std::unique_ptr<Offload> make_offload(const Config& c, const Communicator& world, at::Device device, int64_t taken) {
  OffloadSettings settings{.layers = offloaded_layers(c), .device = device};
  if (device.is_cpu()) require_no_host(c, "this rank computes on a CPU");
  if (settings.layers == 0) return nullptr;
  if (c.memory.offload == "host") {
    settings.host_bytes = c.memory.host.empty()
                              ? std::numeric_limits<int64_t>::max()
                              : std::max<int64_t>(0, *bytes_of_text(c.memory.host) / ranks_here(world) - taken);
  }
  return std::make_unique<Offload>(
      settings, offloads_to_files(c) ? TierFile::in_folder(offload_folder(c), "memory.offload") : nullptr);
}

std::unique_ptr<TieredTensors> make_optimizer_tier(const Config& c, const StateTier& state,
                                                   const TieredTensors::Settings& settings) {
  if (settings.device.is_cpu()) require_no_host(c, "this rank computes on a CPU");
  std::unique_ptr<TierFile> file;
  if (c.optimizer.offload == "file") {
    file = TierFile::in_folder(offload_folder(c), "optimizer.offload");
    file->reserve(state.in_file);
  }
  return std::make_unique<TieredTensors>(settings, std::move(file));
}

}  // namespace annulus
