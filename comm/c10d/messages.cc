// See messages.h.
#include "comm/c10d/messages.h"

#include <algorithm>
#include <cstring>

#include "comm/checks.h"
#include "comm/transfer_state.h"

namespace annulus::c10d_internal {

using namespace comm_internal;

bool Pending::complete() const {
  return std::all_of(transfers.begin(), transfers.end(), [](const TransferPtr& transfer) { return transfer->done; });
}

bool Pending::check(const Communicator& comm) const {
  for (const TransferPtr& transfer : transfers) {
    if (!transfer->failure.empty()) throw_comm(label, describe(comm, *transfer) + " failed: " + transfer->failure);
    if (transfer->came.empty()) continue;
    throw_mismatch(label, describe_mismatch(comm, transfer->peer, transfer->came, transfer->expected));
  }
  return complete();
}

std::string Pending::describe_unfinished(const Communicator& comm) const {
  std::vector<TransferState> states;
  for (const TransferPtr& transfer : transfers) states.push_back(*transfer);
  return comm_internal::describe_unfinished(comm, states, collective);
}

void Messages::add(Pending& pending, TransferPtr transfer) {
  std::erase_if(open_, [](const TransferPtr& open) { return open->done; });
  open_.push_back(transfer);
  pending.transfers.push_back(std::move(transfer));
}

void Messages::start(Pending& pending, bool is_send, int peer, Stream stream, void* data, int64_t bytes,
                     const Kept& kept) {
  add(pending, is_send ? channel_->send(address(peer), stream, data, bytes, kept)
                       : channel_->receive(address(peer), stream, data, bytes, kept));
}

void Messages::start_with_all(Pending& pending, Lane lane, const PartOf& from, const PartOf& to, const Kept& kept) {
  const int size = comm_.size(), rank = comm_.rank();
  for (const bool is_send : {false, true}) {
    for (int i = 1; i < size; ++i) {
      const int peer = is_send ? (rank + i) % size : (rank + size - i) % size;
      const Part part = (is_send ? from : to)(peer);
      if (part.bytes > 0) start(pending, is_send, peer, {lane}, const_cast<void*>(part.data), part.bytes, kept);
    }
  }
}

void Messages::start_headers(const std::shared_ptr<Headers>& headers) {
  headers->all.resize(members_.size(), headers->mine);
  const auto part = [](CollectiveHeader& header) { return Part{&header, sizeof header}; };
  start_with_all(
      headers->pending, Lane::kHeaders, [&](int) { return part(headers->mine); },
      [&](int peer) { return part(headers->all[static_cast<size_t>(peer)]); }, headers);
}

void Messages::start_exchange(Pending& pending, const std::vector<Message>& sends,
                              const std::vector<Message>& receives) {
  for (const Message& message : receives) start(pending, message, false);
  for (const Message& message : sends) start(pending, message, true);
  match_own_messages();
}

void Messages::start(Pending& pending, const Message& message, bool is_send) {
  const int64_t number = (is_send ? sent_ : received_)[static_cast<size_t>(message.peer)]++;
  const auto bytes = static_cast<int64_t>(message.tensor.nbytes());
  if (bytes == 0) return;  // it is counted, so that a peer that expects data notices the missing message
  const Channel::Described described{message.tensor, number};
  if (message.peer != comm_.rank()) {
    const Channel::Address peer = address(message.peer);
    return add(pending, is_send ? channel_->send(peer, described) : channel_->receive(peer, described));
  }
  const auto transfer = std::make_shared<Transfer>();
  static_cast<TransferState&>(*transfer) = {message.peer, is_send, bytes};
  pending.transfers.push_back(transfer);
  (is_send ? own_sends_ : own_receives_).push_back({transfer, described});
}

void Messages::match_own_messages() {
  while (!own_sends_.empty() && !own_receives_.empty()) {
    const Own sent = std::move(own_sends_.front()), received = std::move(own_receives_.front());
    own_sends_.pop_front();
    own_receives_.pop_front();
    const Channel::Described& from = sent.message;
    const Channel::Described& to = received.message;
    const auto same = [&](auto what) { return what(from) == what(to); };
    if (same([](const auto& m) { return m.tensor.nbytes(); }) && same([](const auto& m) { return m.number; }) &&
        same([](const auto& m) { return m.tensor.scalar_type(); })) {
      std::memcpy(to.tensor.mutable_data_ptr(), from.tensor.const_data_ptr(), from.tensor.nbytes());
      sent.transfer->done = received.transfer->done = true;
    } else {
      received.transfer->came = describe_message(from);
      received.transfer->expected = describe_message(to);
    }
  }
}

void Messages::abandon() {
  for (const TransferPtr& transfer : std::exchange(open_, {})) Channel::abandon(transfer);
}

}  // namespace annulus::c10d_internal
