// An all_gather, a reduce_scatter or an all_reduce that is under way between MPI ranks. The headers are exchanged
// first; then the data travel from rank to rank in steps (rounds.h), none of which blocks. Every communicator of the
// process that moves MPI along advances all of these (MpiRuntime::begun), so that waiting for one transfer, or
// computing beside it, never delays another. Used by mpi_communicator.cc. Thread safety: the caller holds the mutex of
// the runtime.
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
  // control: the MPI communicator that carries the headers of collectives. It carries the data as well, with a tag for
  // each call, because two collectives may reach their data in different orders on different ranks. max_message: the
  // piece of ByteType, and the most bytes of one rank's piece in a round.
  BegunCollective(const Communicator& comm, MPI_Comm control, int64_t max_message, comm_internal::Begun call);

  // Posts the headers. Raises Error(kComm) if MPI refuses.
  void start();
  // Advances by one step if the messages that it needs have come. An error is kept for failure().
  void advance() noexcept;

  bool complete() const { return stage_ == Stage::kComplete; }
  // Why it will never be complete; null without an error. With Error(kMismatch), the ranks disagree and no data were
  // sent.
  const std::exception_ptr& failure() const { return failure_; }
  bool over() const { return complete() || failure_ != nullptr; }

  const Communicator& comm() const { return comm_; }
  OpLabel label() const { return label_; }
  bool reduces() const { return reduces_; }
  bool agreed() const { return stage_ != Stage::kAgreeing; }
  // The number of events never decreases, so a caller that compares two values notices every event between them.
  Movement movement() const;
  // The requests that are unfinished at the moment; null between two steps.
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
  comm_internal::Begun call_;  // keeps the tensors until the collective is complete
  OpLabel label_;
  bool reduces_;
  int64_t bytes_;  // that a rank sends, approximately
  Stage stage_ = Stage::kAgreeing;
  std::exception_ptr failure_;

  Pending headers_;
  std::optional<comm_internal::Rounds> rounds_;  // once the ranks have agreed
  std::array<Pending, comm_internal::kRoundsAtOnce> pending_;
  int64_t posted_ = 0, done_ = 0;  // steps
  int64_t through_ = 0;            // the number of messages of the steps that are done
};

// "receiving 16 bytes from rank 1: not done"
std::string describe_unfinished(const Communicator& comm, const BegunCollective& begun);
inline Movement movement(const BegunCollective& begun) { return begun.movement(); }

// Advances each collective that is under way, and removes those that are over.
void advance_all(std::vector<std::shared_ptr<BegunCollective>>& begun);

}  // namespace annulus::mpi_internal
