// A begun all_gather, reduce_scatter or all_reduce that travels as messages between ranks: its headers are exchanged
// first, then the data move in steps (rounds.h), none of which blocks. This is its driver for comm/mpi and comm/c10d,
// which carry the messages.
//
// A process advances all of these together (advance_all), so that waiting for one transfer, or computing beside it,
// never delays another. Thread safety: the caller holds a mutex of the backend that guards all of them.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "comm/headers.h"
#include "comm/rounds.h"

namespace annulus::comm_internal {

class BegunCollective {
 public:
  virtual ~BegunCollective();

  // Advances by one step, or from the headers to the data, if the messages for that have arrived. Returns whether they
  // have. An error is kept for check().
  bool advance() noexcept;
  bool complete() const { return complete_; }
  // Returns complete(). Raises an error if it never will be; with Error(kMismatch) no data were sent.
  bool check() const;
  bool over() const { return complete_ || failure_ != nullptr; }

  const Communicator& comm() const { return comm_; }
  // "receiving 16 bytes from rank 1: not done"
  virtual std::string describe_unfinished() const = 0;

 protected:
  // max_message: the most bytes of one rank's piece in a round. Takes the memory of a reduction, which the destructor
  // returns: so the steps of a run take and return it in the same order, however late messages arrive, and find it in
  // the pool.
  BegunCollective(const Communicator& comm, Begun call, int64_t max_message);

  const Communicator& comm_;
  Begun call_;  // keeps the tensors until the collective is complete
  const int64_t max_message_;

 private:
  // The messages, which a backend carries. Those of different collectives must not be confused, although ranks may
  // reach their data in different orders. These functions raise Error(kComm) if a message has failed.

  // The headers of all ranks, in rank order; null until all have arrived.
  virtual const std::vector<CollectiveHeader>* headers() = 0;
  // Starts the messages of step `step`: 0, 1, ... `kept` keeps the memory alive that they are read from and written to.
  virtual void start_step(int64_t step, const std::vector<Rounds::Message>& sends,
                          const std::vector<Rounds::Message>& receives, const std::shared_ptr<const void>& kept) = 0;
  // Returns true if step `step`, the earliest that is under way, is complete, and forgets it.
  virtual bool finish_step(int64_t step) = 0;

  std::shared_ptr<Rounds> rounds_;
  std::exception_ptr refused_;  // why there are none; raised once the ranks have agreed
  bool agreed_ = false;
  int64_t started_ = 0, done_ = 0;  // steps
  bool complete_ = false;
  std::exception_ptr failure_;
};

// The collectives that are under way, in the order in which they were begun.
using BegunCollectives = std::vector<std::shared_ptr<BegunCollective>>;
// Advances each once, and removes those that are over. Returns whether any has advanced.
bool advance_all(BegunCollectives& begun);
// Removes those of a communicator that has died. They are never freed, because the transport may still use their
// memory.
void abandon_all(BegunCollectives& begun, const Communicator& comm);

}  // namespace annulus::comm_internal
