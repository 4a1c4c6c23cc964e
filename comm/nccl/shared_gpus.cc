// See shared_gpus.h.
#include "comm/nccl/shared_gpus.h"

#include <unistd.h>

#include <array>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "common/error.h"
#include "common/files.h"
#include "common/text.h"

namespace annulus::nccl_internal {
namespace {

constexpr int kSeveralRanks = 23000;  // the first version with NCCL_MULTI_RANK_GPU_ENABLE, 2.30.0

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

bool enabled(int version) { return version >= kSeveralRanks && variable("NCCL_MULTI_RANK_GPU_ENABLE") == "1"; }

std::string remedy_of(int version) {
  return version >= kSeveralRanks ? "set NCCL_MULTI_RANK_GPU_ENABLE=1"
                                  : "start each rank as a process with an NCCL_HOSTID of its own";
}

}  // namespace

std::string GpuIdentity::text() const { return words_to_line({host, machine, pci, host_id}); }

GpuIdentity GpuIdentity::of_text(const std::string& text) {
  std::vector<std::string> words = words_of_line(text);
  words.resize(4);
  return {std::move(words[0]), std::move(words[1]), std::move(words[2]), std::move(words[3])};
}

GpuIdentity identity_of(const std::string& pci) {
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  return {name.data(), first_line("/proc/sys/kernel/random/boot_id"), pci, variable("NCCL_HOSTID")};
}

std::string gpu_sharing_remedy(int version) {
  if (enabled(version) || !variable("NCCL_HOSTID").empty()) return "";
  return remedy_of(version);
}

void refuse_shared_gpus(const std::vector<GpuIdentity>& gpus, int version) {
  if (enabled(version)) return;
  const auto same = [](const GpuIdentity& a, const GpuIdentity& b) {
    return a.host == b.host && a.machine == b.machine && a.pci == b.pci && a.host_id == b.host_id;
  };
  for (size_t rank = 0; rank < gpus.size(); ++rank) {
    for (size_t other = 0; other < rank && !gpus[rank].pci.empty(); ++other) {
      if (!same(gpus[rank], gpus[other])) continue;
      throw Error(ErrorKind::kPlan, "comm",
                  "ranks " + std::to_string(other) + " and " + std::to_string(rank) + " use the same GPU (" +
                      gpus[rank].host + " " + gpus[rank].pci + "), but NCCL " + nccl_version_text(version) +
                      " allows one rank per GPU: start as many ranks as there are GPUs, or, to try several ranks on "
                      "one GPU, " +
                      remedy_of(version));
    }
  }
}

std::string nccl_version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

}  // namespace annulus::nccl_internal
