// MPI for this process: started once, ended once, neither without a deadline. Bootstrap owns one; tests may, too.
#pragma once

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

namespace mpi_internal {
class BegunCollective;
}

struct MpiOptions {
  // Deadline of each of MPI_Init, MPI_Comm_split, MPI_Comm_dup and MPI_Finalize, which cannot be polled. When it
  // passes, the process prints one message and ends with _exit(6). That of MPI_Finalize is no shorter than the timeout
  // of the operations before it, and starts anew as long as `all_live` says so.
  Seconds timeout{60};
  // Longer messages travel as one message of a datatype made of pieces of this size: MPI counts are 31 bits.
  int64_t max_piece_bytes = int64_t{1} << 30;
  // What is known of ranks that keep others waiting; `in_job` is MpiRuntime::in_job. Asked when a wait has missed its
  // deadline. "rank 1 is stopped", or empty. May be called by any thread.
  std::function<std::string(const std::function<int(int)>& in_job)> describe_stalled = nullptr;
  // Whether it is known that every rank of the job lives and none is stopped: those that have not come to MPI_Finalize
  // are still at work. Null: it is never known. May be called by any thread.
  std::function<bool()> all_live = nullptr;
};

// Owns MPI_Init and MPI_Finalize. Communicators made from it keep it alive.
//
// MPI_Finalize is called when the last owner goes, but not while an exception unwinds the stack, nor after abandon() or
// a missed deadline: it would wait for ranks that will never come. The process must then end by itself (return from
// main or exit with a code other than 0), which makes the launcher end the other ranks.
//
// Thread safety: one mutex guards every MPI call of the process; communicators may live in different threads.
class MpiRuntime : public std::enable_shared_from_this<MpiRuntime> {
 public:
  // Error(kComm) when MPI cannot start; Error(kInternal) when it was already started in this process.
  static std::shared_ptr<MpiRuntime> start(const MpiOptions& options = {});
  ~MpiRuntime();
  MpiRuntime(const MpiRuntime&) = delete;
  MpiRuntime& operator=(const MpiRuntime&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  // "Open MPI v4.1.4"
  const std::string& version() const { return version_; }

  // A communicator over all ranks: CPU tensors of any dtype; reductions on fp32, fp64 and int64, and of bf16
  // by reduce_scatter. Collective.
  std::unique_ptr<Communicator> make_world();

  // Says which number each rank of MPI_COMM_WORLD has in the job, where that is another. Not while ranks communicate.
  void number_ranks(std::vector<int> in_job) { in_job_ = std::move(in_job); }
  int in_job(int world_rank) const { return in_job_.empty() ? world_rank : in_job_[static_cast<size_t>(world_rank)]; }

  // From now on the process leaves without MPI_Finalize.
  void abandon() { abandoned_ = true; }
  bool abandoned() const { return abandoned_; }

  // MPI_Finalize now, unless abandon() was called, though communicators live: they must not be used any more. For hosts
  // such as Python, which at their end leave objects alive that hold some.
  void finish();

  // How long an operation between ranks may take: communicators say it at each of theirs, and a host that may end
  // without any says it itself. Thread-safe.
  void note_timeout(Seconds timeout) { operation_timeout_ = timeout; }

  // Internal to comm/mpi.
  std::mutex& mutex() { return mutex_; }
  const MpiOptions& options() const { return options_; }
  // What was begun and is under way, of all communicators, in the order of the begins; under the mutex.
  std::vector<std::shared_ptr<mpi_internal::BegunCollective>>& begun() { return begun_; }
  // "; rank 1 is stopped", or empty: the end of a message about a deadline.
  std::string stalled() const;

 private:
  MpiRuntime() = default;
  MpiOptions options_;
  std::mutex mutex_;
  std::atomic<bool> abandoned_ = false;
  std::atomic<Seconds> operation_timeout_ = Seconds(0);
  int rank_ = 0;
  int size_ = 1;
  std::string version_;
  std::vector<int> in_job_;  // empty: the same
  std::vector<std::shared_ptr<mpi_internal::BegunCollective>> begun_;
};

}  // namespace annulus
