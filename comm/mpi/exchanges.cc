// See exchanges.h.
#include "comm/mpi/exchanges.h"

#include <cstring>
#include <optional>
#include <string>

#include "comm/checks.h"
#include "common/error.h"
#include "common/text.h"
#include "memory/pool/shared_memory.h"
#include "memory/releasable.h"

namespace annulus::mpi_internal {
namespace {

// MPI_TAG_UB
int64_t highest_tag(MPI_Comm comm) {
  void* bound = nullptr;
  int found = 0;
  check_mpi(MPI_Comm_get_attr(comm, MPI_TAG_UB, static_cast<void*>(&bound), &found), "MPI_Comm_get_attr");
  return found != 0 ? *static_cast<int*>(bound) : 32767;
}

std::string describe_tag(int64_t bytes, int tag, const std::string& shape = "") {
  return comm_internal::describe_message(bytes, MessageTags::sequence_of(tag), MessageTags::dtype_of(tag), shape);
}

}  // namespace

Exchanges::Exchanges(const Communicator& comm, MpiRuntime& runtime, MPI_Comm data)
    : comm_(comm),
      runtime_(runtime),
      data_(data),
      tags_(highest_tag(data)),
      sent_(static_cast<size_t>(comm.size()), 0),
      received_(sent_.size(), 0),
      expected_(sent_.size()) {}

void Exchanges::start(const PendingPtr& pending, const std::vector<Message>& sends,
                      const std::vector<Message>& receives) {
  for (const Message& message : receives) start_message(pending, message, false);
  for (const Message& message : sends) start_message(pending, message, true);
  if (pending->open == 0) return;
  open_.push_back(pending);
  ++runtime_.exchanges();
}

void Exchanges::start_message(const PendingPtr& pending, const Message& message, bool is_send) {
  const size_t peer = static_cast<size_t>(message.peer);
  const int64_t sequence = (is_send ? sent_ : received_)[peer]++;
  const auto bytes = static_cast<int64_t>(message.tensor.nbytes());
  if (bytes == 0) return;  // it is counted, so that a peer that expects data notices the missing message
  const int tag = tags_.of(sequence, message.tensor.scalar_type());
  MPI_Request request = MPI_REQUEST_NULL;
  int code = MPI_SUCCESS;
  std::shared_ptr<LentMemory> lent;
  if (is_send && comm_.lends_to(message.peer)) {
    if (const auto loan = runtime_.shared_memory()->lend(message.tensor)) lent = std::make_shared<LentMemory>(*loan);
  }
  if (lent) {
    // It is complete once the receiver has matched it. An address is so short that MPI would call it complete at once,
    // and a rank that only sends would run ahead of the others and hold what it has lent for all their layers.
    code = MPI_Issend(lent.get(), sizeof(LentMemory), MPI_BYTE, message.peer, MessageTags::lent(tag), data_, &request);
  } else if (is_send) {
    const ByteType type(bytes, runtime_.options().max_piece_bytes);
    code = MPI_Isend(message.tensor.const_data_ptr(), type.count(), type.type(), message.peer, tag, data_, &request);
  }
  add_request(comm_, *pending, request, {{message.peer, is_send, bytes}, message.tensor, tag, std::move(lent)}, code);
  if (is_send) return;
  if (expected_[peer].empty()) expecting_.push_back(message.peer);
  expected_[peer].emplace_back(pending, pending->items.size() - 1);
}

PendingPtr Exchanges::match() {
  for (size_t i = 0; i < expecting_.size();) {
    const int peer = expecting_[i];
    auto& queue = expected_[static_cast<size_t>(peer)];
    while (!queue.empty()) {
      MPI_Message message = MPI_MESSAGE_NULL;
      MPI_Status status;
      int came = 0;
      check_mpi(MPI_Improbe(peer, MPI_ANY_TAG, data_, &came, &message, &status), "MPI_Improbe");
      if (came == 0) break;
      const auto [pending, index] = queue.front();
      queue.pop_front();
      Pending::Item& item = pending->items[index];
      MPI_Count bytes = 0;
      check_mpi(MPI_Get_elements_x(&status, MPI_BYTE, &bytes), "MPI_Get_elements_x");
      const bool lent = MessageTags::is_lent(status.MPI_TAG);
      if (MessageTags::not_lent(status.MPI_TAG) != item.tag || (!lent && bytes != item.bytes)) {
        return mismatched(pending, item, status.MPI_TAG, bytes);
      }
      ++pending->found;
      MPI_Request& request = pending->requests[index];
      if (lent) {
        item.lent = std::make_shared<LentMemory>();
        pending->loans.push_back(index);
        check_mpi(MPI_Imrecv(item.lent.get(), sizeof(LentMemory), MPI_BYTE, &message, &request), "MPI_Imrecv");
        continue;
      }
      if (!has_memory(item.tensor)) give_own_memory(item.tensor);
      const ByteType type(item.bytes, runtime_.options().max_piece_bytes);
      check_mpi(MPI_Imrecv(item.tensor.mutable_data_ptr(), type.count(), type.type(), &message, &request),
                "MPI_Imrecv");
    }
    if (queue.empty()) {
      expecting_[i] = expecting_.back();
      expecting_.pop_back();
    } else {
      ++i;
    }
  }
  return nullptr;
}

PendingPtr Exchanges::mismatched(const PendingPtr& pending, const Pending::Item& item, int tag, int64_t bytes) const {
  pending->mismatch =
      comm_internal::describe_mismatch(comm_, item.peer, describe_tag(bytes, tag),
                                       describe_tag(item.bytes, item.tag, ", " + list_text(item.tensor.sizes())));
  return pending;
}

// Takes the memory whose addresses have arrived: for the tensor itself, or to copy it where the tensor has memory.
PendingPtr Exchanges::take_loans(const PendingPtr& pending) {
  for (size_t i = 0; i < pending->loans.size();) {
    Pending::Item& item = pending->items[pending->loans[i]];
    if (!item.done) {
      ++i;
      continue;
    }
    if (item.lent->bytes != item.bytes) return mismatched(pending, item, item.tag, item.lent->bytes);
    c10::DataPtr memory = borrow(item);
    if (has_memory(item.tensor)) {
      std::memcpy(item.tensor.mutable_data_ptr(), memory.get(), item.tensor.nbytes());
    } else {
      give_memory(item.tensor, std::move(memory));
    }
    pending->loans.erase(pending->loans.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return nullptr;
}

c10::DataPtr Exchanges::borrow(const Pending::Item& item) const {
  try {
    return runtime_.shared_memory()->borrow(*item.lent);
  } catch (const Error& e) {
    throw Error(ErrorKind::kComm, "comm", describe(comm_, item) + ": " + std::string(e.message()));
  }
}

PendingPtr Exchanges::poll(const PendingPtr& pending) {
  test_requests(comm_, *pending);
  if (PendingPtr odd = take_loans(pending)) return odd;
  if (pending->open == 0) runtime_.exchanges() -= std::erase(open_, pending);
  return nullptr;
}

void Exchanges::abandon() {
  runtime_.exchanges() -= open_.size();
  open_.clear();
  [[maybe_unused]] const auto* leaked = new auto(std::move(expected_));
  expected_ = {};
  expected_.resize(sent_.size());
  expecting_.clear();
}

}  // namespace annulus::mpi_internal
