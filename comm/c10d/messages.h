// The messages between the ranks of a communicator over a process group: starts them, and describes those that are
// under way. Used by c10d_communicator.cc. Thread safety: the caller holds arrivals().mutex.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/c10d/channel.h"
#include "comm/communicator.h"
#include "comm/headers.h"

namespace annulus::c10d_internal {

// The messages of one operation, or of one step of a begun collective.
struct Pending {
  std::vector<TransferPtr> transfers;
  OpLabel label;
  const char* collective = nullptr;  // the name of the collective; null for an exchange

  bool complete() const;
  // Returns complete(). Raises Error(kComm) if a message has failed, and Error(kMismatch) if another message came than
  // was expected.
  bool check(const Communicator& comm) const;
  std::string describe_unfinished(const Communicator& comm) const;
};
using PendingPtr = std::shared_ptr<Pending>;

// The headers of a collective, on their way to and from every other rank.
struct Headers {
  Pending pending;
  comm_internal::CollectiveHeader mine;
  std::vector<comm_internal::CollectiveHeader> all;
};

// The memory of a message to or from a rank. With 0 bytes there is no message.
struct Part {
  const void* data = nullptr;
  int64_t bytes = 0;
};
using PartOf = std::function<Part(int rank)>;

// Starts the messages of a communicator. The functions raise Error(kComm) if the group refuses a message.
class Messages {
 public:
  // comm must outlive this object. members: its ranks by their numbers in the group. context: the number that these
  // ranks have agreed on.
  Messages(const Communicator& comm, std::shared_ptr<Channel> channel, std::vector<int> members, int64_t context)
      : comm_(comm),
        channel_(std::move(channel)),
        members_(std::move(members)),
        context_(context),
        sent_(members_.size(), 0),
        received_(members_.size(), 0) {}

  const std::shared_ptr<Channel>& channel() const { return channel_; }
  int in_group(int rank) const { return members_[static_cast<size_t>(rank)]; }

  void start_exchange(Pending& pending, const std::vector<Message>& sends, const std::vector<Message>& receives);
  // Messages to and from every other rank.
  void start_with_all(Pending& pending, Lane lane, const PartOf& from, const PartOf& to, const Kept& kept);
  void start_headers(const std::shared_ptr<Headers>& headers);
  void start(Pending& pending, bool is_send, int peer, Stream stream, void* data, int64_t bytes, const Kept& kept);

  // Gives up the messages that are under way. The group may still use their memory, so it is never freed.
  void abandon();

 private:
  // Messages from this rank to itself that wait for the other end, in order.
  struct Own {
    TransferPtr transfer;
    Channel::Described message;
  };

  Channel::Address address(int peer) const { return {in_group(peer), peer, context_}; }
  void add(Pending& pending, TransferPtr transfer);
  void start(Pending& pending, const Message& message, bool is_send);
  void match_own_messages();

  const Communicator& comm_;
  std::shared_ptr<Channel> channel_;
  std::vector<int> members_;
  int64_t context_;
  std::vector<int64_t> sent_;  // the number of messages so far, by peer
  std::vector<int64_t> received_;
  std::vector<TransferPtr> open_;  // all transfers that may not be done
  std::deque<Own> own_sends_, own_receives_;
};

}  // namespace annulus::c10d_internal
