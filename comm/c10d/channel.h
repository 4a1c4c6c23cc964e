// Messages between the ranks of a process group, for c10d_communicator.cc. Internal to comm/c10d; all that is c10d's is
// behind it, since its headers take long to compile.
//
// A Work of gloo learns that it is complete only in wait(), and a wait() that runs into its timeout breaks every
// connection of the group. So a thread waits for each message under way, without a timeout; it is ended by abort().
// Threads are kept and used again: a process has as many as it ever had messages under way at once.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/unfinished.h"

namespace c10d {
class Backend;
class ProcessGroup;
}  // namespace c10d

namespace annulus::c10d_internal {

// Guards all transfers of the process, and what they are for; `came` is notified whenever one is over. Both last as
// long as the process.
struct Arrivals {
  std::mutex mutex;
  std::condition_variable came;
};
Arrivals& arrivals();

// A message under way. What is not const changes under arrivals().mutex.
struct Transfer : comm_internal::TransferState {
  virtual ~Transfer() = default;
  std::string failure;  // what the group says; never done then
  std::string came;     // "200 bytes (message 3 ...)": not what was `expected`; never done then
  std::string expected;
};
using TransferPtr = std::shared_ptr<Transfer>;

// Holds memory that messages are read from or written to.
using Kept = std::shared_ptr<const void>;

// Two ranks use a lane of a context in the same order. There are 16384 tags for a context, from its lanes.
enum class Lane { kExchange, kHeaders, kBlocking, kBegun };

class Channel {
 public:
  // Error(kUsage) where the group has no backend for CPU tensors.
  explicit Channel(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

  const std::string& name() const { return name_; }
  int rank() const { return rank_; }
  int size() const { return static_cast<int>(in_job_.size()); }
  int in_job(int rank) const { return in_job_[static_cast<size_t>(rank)]; }

  // What communicators over one group must know of each other, as long as the group lives. Under arrivals().mutex.
  struct Contexts {
    int64_t next = 1;    // context; the ranks that share one agree on it. One is used again after 65535 others.
    std::string broken;  // why the ranks of the group could not agree on one: no more can be made
  };
  Contexts& contexts() { return *contexts_; }

  // Where a message goes: to a rank of the group, which is `peer` in its communicator's count.
  struct Address {
    int rank = 0;
    int peer = 0;
    int64_t context = 0;
  };

  // `bytes` at `data`, of which both sides know the number; they last as long as `kept`. Raises Error(kComm) where the
  // group refuses, as all of these.
  TransferPtr send(const Address& to, Lane lane, const void* data, int64_t bytes, Kept kept);
  TransferPtr receive(const Address& from, Lane lane, void* data, int64_t bytes, Kept kept);

  // A message whose receiver may expect another one: number, dtype and size go before it.
  struct Described {
    at::Tensor tensor;
    int64_t number = 0;  // of the messages between the two ranks
  };
  TransferPtr send(const Address& to, const Described& message);
  TransferPtr receive(const Address& from, const Described& message);

  // Nobody waits for this transfer any more. What it may still read or write is never freed. arrivals().mutex is held.
  static void abandon(const TransferPtr& transfer);

 private:
  TransferPtr post(bool is_send, const Address& address, int tag, void* data, int64_t bytes, Kept kept);

  struct Group;
  std::shared_ptr<Group> group_;
  std::shared_ptr<Contexts> contexts_;
  std::string name_;
  int rank_;
  std::vector<int> in_job_;
};

// "200 bytes (message 3 between these ranks, fp32, [50])"
std::string describe_message(const Channel::Described& message);

}  // namespace annulus::c10d_internal
