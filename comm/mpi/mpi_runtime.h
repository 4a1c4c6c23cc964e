// Starts MPI in this process and ends it, once each, within a deadline. Bootstrap owns an MpiRuntime; tests may own
// one, too.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"

namespace annulus {

class SharedMemory;

namespace comm_internal {
class BegunCollective;
}

struct MpiOptions {
  // Deadline of MPI_Init, of make_world() and of MPI_Finalize, which cannot be polled. When it passes, the process
  // prints one message and ends with _exit(6). The deadline of MPI_Finalize is at least the timeout of the operations
  // before it, and starts again as long as all_live() returns true.
  Seconds timeout{60};
  // Messages longer than this number of bytes travel as one message of a datatype that consists of pieces of this size,
  // because MPI counts are 31 bits.
  int64_t max_piece_bytes = int64_t{1} << 30;
  // Whether ranks of one host lend memory to each other (Communicator::lends_to), if they can. They do if all want to.
  bool share_memory = true;
  // Describes which ranks are known to keep others waiting: "rank 1 is stopped", or empty. Called after a wait has
  // missed its deadline, by any thread. `in_job` is MpiRuntime::in_job.
  std::function<std::string(const std::function<int(int)>& in_job)> describe_stalled = nullptr;
  // Whether every rank of the job is known to be alive and not stopped, so that ranks that have not come to
  // MPI_Finalize are still computing. Null if this is never known. Called by any thread.
  std::function<bool()> all_live = nullptr;
};

// Calls MPI_Init and MPI_Finalize. The communicators made from it keep it alive.
//
// MPI_Finalize is called when the last owner is destroyed, but not while an exception unwinds the stack, and not after
// abandon() or a missed deadline, because it would wait for ranks that will never come. The process must then end by
// itself with a code other than 0, which makes the launcher end the other ranks.
//
// Thread safety: one mutex guards every MPI call of the process; communicators may live in different threads.
class MpiRuntime : public std::enable_shared_from_this<MpiRuntime> {
 public:
  // Raises Error(kComm) if MPI cannot start, Error(kUnavailable) if this MPI does not allow calls from several threads,
  // Error(kPlan) if max_piece_bytes is not from 1 to 2^30, Error(kInternal) if MPI was already started in this process.
  static std::shared_ptr<MpiRuntime> start(const MpiOptions& options = {});
  ~MpiRuntime();
  MpiRuntime(const MpiRuntime&) = delete;
  MpiRuntime& operator=(const MpiRuntime&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  // "Open MPI v4.1.4"
  const std::string& version() const { return version_; }

  // A communicator over all ranks. It carries CPU tensors of any dtype, and reduces fp32, fp64 and int64, and with
  // reduce_scatter also bf16. Collective.
  std::unique_ptr<Communicator> make_world();

  // Sets the number in the job of each rank of MPI_COMM_WORLD, if the two differ. Do not call it while ranks
  // communicate.
  void number_ranks(std::vector<int> in_job) { in_job_ = std::move(in_job); }
  int in_job(int world_rank) const { return in_job_.empty() ? world_rank : in_job_[static_cast<size_t>(world_rank)]; }

  // From now on the process ends without MPI_Finalize.
  void abandon() { abandoned_ = true; }
  bool abandoned() const { return abandoned_; }

  // Calls MPI_Finalize now, unless abandon() was called. Communicators that still exist must not be used any more. This
  // is for host programs such as Python, which may end while objects that own communicators still exist.
  // after_failures: also after abandon(), for tests that have provoked failures and whose ranks have all come to this
  // call.
  void finish(bool after_failures = false);

  // Sets how long an operation between ranks may take. Communicators call it with each of their operations; a host
  // program that may end without any operation calls it itself. Thread safe.
  void note_timeout(Seconds timeout) { operation_timeout_ = timeout; }

  // Internal to comm/mpi.
  std::mutex& mutex() { return mutex_; }
  // The memory that ranks of this host share; null if they share none.
  SharedMemory* shared_memory() const { return shared_memory_.get(); }
  bool shares_memory_with(int world_rank) const {
    return shared_memory_ != nullptr && same_host_[static_cast<size_t>(world_rank)];
  }
  const MpiOptions& options() const { return options_; }
  // The collectives of all communicators that were begun and are under way, in the order in which they were begun. The
  // caller holds the mutex.
  std::vector<std::shared_ptr<comm_internal::BegunCollective>>& begun() { return begun_; }
  // The number of exchanges of all communicators that are not known to be complete. The caller holds the mutex.
  size_t& exchanges() { return exchanges_; }
  // Whether all ranks are known to be on one host.
  bool one_host() const {
    return shared_memory_ != nullptr && std::find(same_host_.begin(), same_host_.end(), false) == same_host_.end();
  }
  // The end of an error message about a deadline: "; rank 1 is stopped", or empty.
  std::string stalled() const;

 private:
  MpiRuntime() = default;
  void share_memory();
  MpiOptions options_;
  std::mutex mutex_;
  std::atomic<bool> abandoned_ = false;
  std::atomic<Seconds> operation_timeout_ = Seconds(0);
  int rank_ = 0;
  int size_ = 1;
  std::string version_;
  std::shared_ptr<SharedMemory> shared_memory_;
  std::vector<bool> same_host_;  // by rank of MPI_COMM_WORLD
  std::vector<int> in_job_;      // empty if the numbers are those of MPI_COMM_WORLD
  std::vector<std::shared_ptr<comm_internal::BegunCollective>> begun_;
  size_t exchanges_ = 0;
};

}  // namespace annulus
