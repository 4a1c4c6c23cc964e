// MPI for this process: started once, ended once, neither without a deadline. Bootstrap owns one; tests may, too.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "comm/communicator.h"

namespace annulus {

struct MpiOptions {
  // Deadline of each of MPI_Init, MPI_Comm_split, MPI_Comm_dup and MPI_Finalize, which cannot be polled. When it
  // passes, the process prints one message and ends with _exit(6).
  Seconds timeout{60};
  // Longer messages travel as one message of a datatype made of pieces of this size: MPI counts are 31 bits.
  int64_t max_piece_bytes = int64_t{1} << 30;
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

  // A communicator over all ranks: CPU tensors of any dtype; reductions on fp32, fp64 and int64. Collective.
  std::unique_ptr<Communicator> make_world();

  // From now on the process leaves without MPI_Finalize.
  void abandon() { abandoned_ = true; }

  // MPI_Finalize now, unless abandon() was called, though communicators live: they must not be used any more. For hosts
  // such as Python, which at their end leave objects alive that hold some.
  void finish();

  // Internal to comm/mpi.
  std::mutex& mutex() { return mutex_; }
  const MpiOptions& options() const { return options_; }

 private:
  MpiRuntime() = default;
  MpiOptions options_;
  std::mutex mutex_;
  std::atomic<bool> abandoned_ = false;
  int rank_ = 0;
  int size_ = 1;
  std::string version_;
};

}  // namespace annulus
