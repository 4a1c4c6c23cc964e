// An all_gather, a reduce_scatter or an all_reduce under way between ranks of MPI: the headers first, then the data
// from rank to rank, in steps (rounds.h) of which none blocks. Every communicator of the process that moves MPI along
// moves all of them (MpiRuntime::begun), so that waiting for one kind of transfer, or computing beside it, never holds
// up the other. Used by mpi_communicator.cc. Thread safety: under the mutex of the runtime.
#pragma once

#include <ATen/core/Tensor.h>
#include <mpi.h>

#include <array>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>

#include "comm/communicator.h"
#include "comm/headers.h"
#include "comm/mpi/requests.h"
#include "comm/rounds.h"

namespace annulus::mpi_internal {

class BegunCollective {
 public:
  // control: what carries the headers of collectives. The data travel there as well, under a tag of the call: two
  // collectives may come to their data in one order on one rank and in the other on another. max_message: ByteType's
  // piece, and the most that a round holds of one rank.
  BegunCollective(const Communicator& comm, MPI_Comm control, int64_t max_message, comm_internal::Begun call);

  // Posts the headers. Raises Error(kComm) where MPI refuses.
  void start();
  // One step, where what it needs has come. What fails is kept for failure().
  void advance() noexcept;

  bool complete() const { return stage_ == Stage::kComplete; }
  // Why it never will be; null while all is well. Error(kMismatch): the ranks disagree, and nothing was sent.
  const std::exception_ptr& failure() const { return failure_; }
  bool over() const { return complete() || failure_ != nullptr; }

  const Communicator& comm() const { return comm_; }
  OpLabel label() const { return label_; }
  bool reduces() const { return reduces_; }
  bool agreed() const { return stage_ != Stage::kAgreeing; }
  // Its events never fall, so that whoever compares two misses none in between.
  Movement movement() const;
  // What is unfinished at the moment; null between two steps.
  const Pending* under_way() const;

 private:
  enum class Stage { kAgreeing, kMoving, kComplete };

  void agree();
  void post_steps();
  void post_step(int64_t step);
  Pending& slot(int64_t step) { return pending_[static_cast<size_t>(step % comm_internal::kRoundsAtOnce)]; }

  const Communicator& comm_;
  MPI_Comm control_;
  int64_t max_message_;
  comm_internal::Begun call_;  // its tensors until it is complete
  OpLabel label_;
  bool reduces_;
  int64_t bytes_;  // that a rank sends, about
  Stage stage_ = Stage::kAgreeing;
  std::exception_ptr failure_;

  Pending headers_;
  std::optional<comm_internal::Rounds> rounds_;  // once the ranks have agreed
  std::array<Pending, comm_internal::kRoundsAtOnce> pending_;
  int64_t posted_ = 0, done_ = 0;  // steps
  int64_t through_ = 0;            // messages of the steps that are done
};

// "receiving 16 bytes from rank 1: not done"
std::string describe_unfinished(const Communicator& comm, const BegunCollective& begun);
inline Movement movement(const BegunCollective& begun) { return begun.movement(); }

// A pass over all that are under way; those that are over are dropped.
void advance_all(std::vector<std::shared_ptr<BegunCollective>>& begun);

}  // namespace annulus::mpi_internal
