// The messages between two ranks of an MPI communicator: starts them, matches those that arrive with the receives that
// expect them, in order, and lends and borrows memory between ranks of one host (memory/pool/shared_memory.h). Used by
// mpi_communicator.cc. Thread safety: the caller holds the mutex of the runtime.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "comm/mpi/message_tags.h"
#include "comm/mpi/mpi_runtime.h"
#include "comm/mpi/requests.h"

namespace annulus::mpi_internal {

class Exchanges {
 public:
  // comm must outlive this object; data carries the messages.
  Exchanges(const Communicator& comm, MpiRuntime& runtime, MPI_Comm data);

  // Starts the messages of one exchange, and adds them to `pending`. Raises Error(kComm) if MPI refuses one.
  void start(const PendingPtr& pending, const std::vector<Message>& sends, const std::vector<Message>& receives);

  // Receives the messages that have arrived. If one is not the expected one, returns the exchange that expected another
  // message, with its `mismatch` set: the communicator is then dead. Otherwise null.
  PendingPtr match();
  // Makes one pass over the requests of an exchange or a collective, and takes memory that has been lent. Returns what
  // match() returns. Raises Error(kComm) if a request has failed, or lent memory cannot be opened.
  PendingPtr poll(const PendingPtr& pending);

  // The exchanges that are not known to be complete.
  const std::vector<PendingPtr>& open() const { return open_; }
  // Forgets all messages. MPI may still use their memory, so it is never freed. Nor is what they lend counted off,
  // because a receiver may still take it; a process with a dead communicator must end anyway (MpiRuntime), and lends
  // nothing more over it.
  void abandon();

 private:
  void start_message(const PendingPtr& pending, const Message& message, bool is_send);
  PendingPtr mismatched(const PendingPtr& pending, const Pending::Item& item, int tag, int64_t bytes) const;
  PendingPtr take_loans(const PendingPtr& pending);
  c10::DataPtr borrow(const Pending::Item& item) const;

  const Communicator& comm_;
  MpiRuntime& runtime_;
  MPI_Comm data_;
  MessageTags tags_;
  std::vector<int64_t> sent_;  // the number of messages so far, by peer
  std::vector<int64_t> received_;
  // The receives whose message has not come, in order, by peer; and the peers that have any.
  std::vector<std::deque<std::pair<PendingPtr, size_t>>> expected_;
  std::vector<int> expecting_;
  std::vector<PendingPtr> open_;
};

}  // namespace annulus::mpi_internal
