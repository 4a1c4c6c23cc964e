// See terms_in_job.h.
#include "attention/execution/terms_in_job.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "attention/plan/time.h"
#include "comm/agreement.h"
#include "comm/bootstrap/launch_info.h"
#include "common/environment.h"
#include "memory/available.h"
#include "memory/device_memory.h"

namespace annulus {
namespace {

// What the ranks of communicators have found to be free, as long as these exist.
struct Found {
  std::mutex mutex;
  std::map<std::weak_ptr<Communicator>, int64_t, std::owner_less<>> least;

  std::optional<int64_t> of(const std::weak_ptr<Communicator>& comm) {
    const std::lock_guard lock(mutex);
    const auto found = least.find(comm);
    return found == least.end() ? std::nullopt : std::optional(found->second);
  }
};
Found& found() {
  static Found& all = *new Found;  // never destroyed, because threads may outlive static objects
  return all;
}

// How many ranks share this host's memory. Those of the job that are not of this communicator do, too.
int ranks_here(const Communicator& comm) {
  const RankHosts& hosts = comm.hosts();
  int here = 0;
  for (int rank = 0; rank < hosts.ranks(); ++rank) here += hosts.of(rank) == hosts.of(comm.rank()) ? 1 : 0;
  const LaunchInfo info = launch_info();
  const int of_job =
      info.launched ? info.local_size : static_cast<int>(number_from_environment("LOCAL_WORLD_SIZE", 1, 1, 1 << 20));
  return std::max(here, of_job);
}

}  // namespace

int64_t free_bytes(Communicator& comm, c10::Device device) {
  if (comm.size() == 1) return 0;
  if (const std::optional<int64_t> least = found().of(comm.weak_from_this())) return *least;
  const std::optional<AvailableMemory> memory = available_memory(device);
  return memory ? std::max<int64_t>(0, memory->bytes) / (device.is_cpu() ? ranks_here(comm) : 1) : 0;
}

int64_t least_free_bytes(Communicator& comm, c10::Device device, OpLabel label) {
  int64_t least = 0;
  for (const Terms::Numbers& of : agree_together(comm, label, [&]() -> Terms {
         return {{}, {free_bytes(comm, device)}};
       })) {
    if (of[0] > 0 && (least == 0 || of[0] < least)) least = of[0];
  }
  return least;
}

TermsPointer terms_in_job(const TermsPointer& terms, Communicator& comm, int64_t least) {
  const std::weak_ptr<Communicator> key = comm.weak_from_this();
  if (least > 0 && !key.expired()) {
    const std::lock_guard lock(found().mutex);
    std::erase_if(found().least, [](const auto& entry) { return entry.first.expired(); });
    found().least.emplace(key, least);
  }
  const TermsPointer placed = on_hosts(terms, comm.hosts());
  if (least <= 0 || comm.size() == 1) return placed;
  return within_memory(placed, static_cast<double>(least), /*or_leanest=*/true);
}

TermsPointer terms_in_job(const TermsPointer& terms, Communicator& comm) {
  return terms_in_job(terms, comm, found().of(comm.weak_from_this()).value_or(0));
}

}  // namespace annulus
