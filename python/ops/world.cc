// Implements world.h.
#include "python/ops/world.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "comm/bootstrap/launch_info.h"
#include "comm/c10d/groups.h"
#include "comm/threads/threads.h"
#include "common/environment.h"
#include "common/error.h"
#include "common/text.h"
#include "python/ops/launched.h"

namespace annulus::torch_ops {
namespace {

constexpr double kShortest = 0.1, kLongest = 365.0 * 86400;  // seconds

std::atomic<double> chosen{0};  // seconds set by set_timeout; 0: not set

Seconds timeout() {
  const double seconds = chosen;
  return Seconds(seconds > 0 ? seconds : number_from_environment("ANNULUS_TIMEOUT", 300, kShortest, kLongest));
}

// The mutex of a communicator, which exists as long as the communicator.
std::shared_ptr<std::mutex> turns_of(const std::shared_ptr<Communicator>& comm) {
  static std::mutex& guard = *new std::mutex;
  static auto& turns =
      *new std::map<std::weak_ptr<Communicator>, std::shared_ptr<std::mutex>, std::owner_less<>>;  // never destroyed
  const std::lock_guard lock(guard);
  std::erase_if(turns, [](const auto& entry) { return entry.first.expired(); });
  std::shared_ptr<std::mutex>& mutex = turns[comm];
  if (!mutex) mutex = std::make_shared<std::mutex>();
  return mutex;
}

Turn turn_with(std::shared_ptr<Communicator> comm, pid_t process, const char* connections) {
  if (getpid() != process) {
    throw Error(ErrorKind::kUsage, "torch",
                std::string("this process was forked after its parent had found the other ranks, and ") + connections +
                    " belong to the parent: call attention and all_reduce in the parent only, not in workers that load "
                    "data; or start processes before the first call, or with multiprocessing's start method "
                    "\"spawn\"");
  }
  std::shared_ptr<std::mutex> mutex = turns_of(comm);
  std::unique_lock lock(*mutex);
  comm->set_timeout(timeout());
  return {std::move(comm), std::move(mutex), std::move(lock)};
}

// Finds the ranks for the group "". Raises Error(kUsage) if a launcher such as torchrun announced several processes:
// otherwise each would compute alone, and wrongly, what is meant for all. ANNULUS_WORLD_SIZE overrides the
// announcement.
const Launched& found() {
  const LaunchInfo info = launch_info();
  const Announcement& announced = info.announced;
  if (info.annulus_size == 0 && announced.size > (info.launched ? info.size : 1)) {
    const std::string size = std::to_string(announced.size);
    throw Error(ErrorKind::kUsage, "torch",
                announced.launcher + " started " + size + " processes (" + announced.variable + " = " + size +
                    "), but the call names no process group: pass the name of one as group, such as "
                    "torch.distributed.group.WORLD.group_name after init_process_group, or set ANNULUS_WORLD_SIZE=1 if "
                    "each process is to compute alone");
  }
  return launched(timeout());
}

// The ranks for the group "", which the first call finds.
const Launched& ranks_without_a_name() {
  static const Launched& ranks = found();
  return ranks;
}

}  // namespace

Turn take_turn(const std::string& group, const at::Tensor& tensor) {
  if (!group.empty()) {
    static const pid_t first = getpid();
    const at::Device device = tensor.defined() && tensor.is_cuda() ? tensor.device() : at::Device(at::kCPU);
    if (getpid() != first) return turn_with(nullptr, first, "the connections of process groups");
    // Processes that have just started reach their first call further apart in time than any later one.
    const Seconds start(number_from_environment("ANNULUS_BOOTSTRAP_TIMEOUT", 60, 0.1, 86400));
    return turn_with(c10d_communicator(group, device, std::max(timeout(), start)), first,
                     "the connections of process groups");
  }
  const Launched& ranks = ranks_without_a_name();
  if (ranks.comm->size() == 1) return {make_self_communicator(), nullptr, {}};
  return turn_with(ranks.comm, ranks.process, "MPI's connections");
}

Place place_in(const std::string& group) {
  if (!group.empty()) {
    const auto ranks = named_group(group);
    return {ranks->getRank(), ranks->getSize()};
  }
  const Launched& ranks = ranks_without_a_name();
  return {ranks.comm->rank(), ranks.comm->size()};
}

std::shared_ptr<Communicator> used_communicator(const std::string& group, at::Device device) {
  return group.empty() ? ranks_without_a_name().comm : made_communicator(group, device);
}

void set_timeout(double seconds) {
  if (!(seconds >= kShortest && seconds <= kLongest)) {
    throw Error(ErrorKind::kUsage, "comm",
                "expected a timeout from " + exact(kShortest) + " to " + exact(kLongest) + " seconds, but got " +
                    exact(seconds));
  }
  chosen = seconds;
}

}  // namespace annulus::torch_ops
