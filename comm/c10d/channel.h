// Messages between the ranks of a process group, for c10d_communicator.cc. Internal to comm/c10d. It hides the headers
// of c10d, which take long to compile.
//
// A Work of gloo only notices in wait() that it is complete, and a wait() that times out breaks every connection of the
// group. So a thread waits for each message that is under way, without a timeout; abort() ends its wait. Threads are
// kept and reused: a process has as many as it ever had messages under way at the same time.
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
#include "comm/transfer_state.h"

namespace c10d {
class Backend;
class ProcessGroup;
}  // namespace c10d

namespace annulus::c10d_internal {

// `mutex` guards all transfers of the process and the operations that they belong to; `arrived` is notified whenever a
// transfer is over. Both exist as long as the process.
struct Arrivals {
  std::mutex mutex;
  std::condition_variable arrived;
};
Arrivals& arrivals();

// A message that is under way. Its members change under arrivals().mutex.
struct Transfer : comm_internal::TransferState {
  virtual ~Transfer() = default;
  std::string failure;   // the group's error; the transfer is then never done
  std::string came;      // "200 bytes (message 3 ...)" if another message came; the transfer is then never done
  std::string expected;  // the description of the expected message
};
using TransferPtr = std::shared_ptr<Transfer>;

// Keeps alive the memory that messages are read from or written to.
using Kept = std::shared_ptr<const void>;

// What messages are for. A context has 16384 tags, 4096 for each lane.
enum class Lane { kExchange, kHeaders, kBlocking, kBegun };
// A stream of messages within a context, which two ranks start in the same order. The streams of a lane that are used
// at the same time must differ in `number % 4096`.
struct Stream {
  Lane lane;
  int64_t number = 0;
};

class Channel {
 public:
  // Raises Error(kUsage) if the group has no backend for CPU tensors.
  explicit Channel(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

  const std::string& name() const { return name_; }
  int rank() const { return rank_; }
  int size() const { return static_cast<int>(in_job_.size()); }
  int in_job(int rank) const { return in_job_[static_cast<size_t>(rank)]; }

  // State that all communicators over one group share, as long as the group exists. Guarded by arrivals().mutex.
  struct Contexts {
    int64_t next = 1;    // the next free context. The ranks that share one agree on it; numbers repeat after 65535.
    std::string broken;  // why the ranks could not agree on a context: no more communicators can be made
  };
  Contexts& contexts() { return *contexts_; }

  // The other end of a message.
  struct Address {
    int rank = 0;  // its rank in the group
    int peer = 0;  // its rank in the communicator
    int64_t context = 0;
  };

  // Sends or receives `bytes` bytes at `data`; both sides know the number. `kept` keeps this memory alive. All four
  // functions raise Error(kComm) if the group refuses the message.
  TransferPtr send(const Address& to, Stream stream, const void* data, int64_t bytes, Kept kept);
  TransferPtr receive(const Address& from, Stream stream, void* data, int64_t bytes, Kept kept);

  // A message whose receiver may expect a different one: its number, dtype and size are sent before it.
  struct Described {
    at::Tensor tensor;
    int64_t number = 0;  // the number of messages between the two ranks before this one
  };
  TransferPtr send(const Address& to, const Described& message);
  TransferPtr receive(const Address& from, const Described& message);

  // Gives up a transfer. The memory that it may still read or write is never freed. The caller holds arrivals().mutex.
  static void abandon(const TransferPtr& transfer);

 private:
  TransferPtr start(bool is_send, const Address& address, int tag, void* data, int64_t bytes, Kept kept);

  struct Group;
  std::shared_ptr<Group> group_;
  std::shared_ptr<Contexts> contexts_;
  std::string name_;
  int rank_;
  std::vector<int> in_job_;
};

// Forgets the state of groups that have ended (Channel::contexts). While it is kept, the destructor of a group does not
// run, because c10 delays it until no weak reference is left.
void forget_ended_groups();

// "200 bytes (message 3 between these ranks, fp32, [50])"
std::string describe_message(const Channel::Described& message);

}  // namespace annulus::c10d_internal
