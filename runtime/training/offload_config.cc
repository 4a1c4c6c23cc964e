// See offload_config.h.
#include "runtime/training/offload_config.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <system_error>

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

std::string offload_folder(const Config& c) {
  if (!c.memory.files.empty()) return c.memory.files;
  std::error_code error;  // whoever uses the folder says what is wrong with it
  std::filesystem::create_directories(c.run.folder, error);
  return c.run.folder;
}

std::unique_ptr<Offload> make_offload(const Config& c, const Communicator& world, at::Device device) {
  OffloadSettings settings{.layers = offloaded_layers(c), .device = device};
  if (device.is_cpu() && c.memory.offload == "host") {
    throw Error(ErrorKind::kUsage, "train",
                "memory.offload = \"host\" moves tensors from a GPU to its host's memory, and this rank computes on a "
                "CPU: use memory.offload = \"file\"");
  }
  if (settings.layers == 0) return nullptr;
  if (c.memory.offload == "host") {
    settings.host_bytes =
        c.memory.host.empty() ? std::numeric_limits<int64_t>::max() : *bytes_of_text(c.memory.host) / ranks_here(world);
  }
  return std::make_unique<Offload>(settings, offloads_to_files(c) ? TierFile::in_folder(offload_folder(c)) : nullptr);
}

}  // namespace annulus
