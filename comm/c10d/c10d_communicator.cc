// The part of the backend over process groups that carries CPU tensors.
//
// - All data travel as messages between two ranks (channel.h), never by the group's own collectives: a group cannot
//   abandon a collective that some ranks do not join, and the program's own collectives would be ordered with these.
// - A communicator has a context, a number that its ranks agree on and that is part of the tags. So the messages of
//   several communicators over one group, such as splits, are never confused.
// - Before a collective every rank sends its header to every other, so that a missing rank can be named and ranks that
//   disagree all notice before any data are sent. Blocking reductions add in the order of the ranks as well.
#include "comm/c10d/c10d_communicator.h"

#include <unistd.h>

#include <algorithm>
#include <deque>
#include <exception>
#include <limits>
#include <mutex>
#include <numeric>
#include <utility>

#include "comm/begun_collective.h"
#include "comm/c10d/channel.h"
#include "comm/c10d/internal.h"
#include "comm/c10d/messages.h"
#include "comm/checks.h"
#include "comm/communicator_backend.h"
#include "comm/deadline.h"
#include "comm/headers.h"
#include "comm/hosts.h"
#include "comm/rank_order.h"
#include "common/error.h"
#include "memory/pool/pool_tensor.h"

namespace annulus::c10d_internal {
namespace {

using namespace comm_internal;

// The collectives of this process that are under way.
BegunCollectives& begun_collectives() {
  static auto& begun = *new BegunCollectives;
  return begun;
}

// Advances them as far as the messages that have arrived allow.
void advance_begun() {
  while (advance_all(begun_collectives())) {
  }
}

// Each call has a stream of its own, because ranks may reach the data of several in different orders.
class C10dBegunCollective final : public BegunCollective {
 public:
  // headers: those of the call, which have been started.
  C10dBegunCollective(const Communicator& comm, Messages& messages, const Begun& call, std::shared_ptr<Headers> headers)
      : BegunCollective(comm, call, std::numeric_limits<int64_t>::max()),
        messages_(messages),
        stream_{Lane::kBegun, call.header.call},
        headers_(std::move(headers)) {}

  std::string describe_unfinished() const override {
    if (!headers_->pending.complete()) return headers_->pending.describe_unfinished(comm_);
    for (const Pending& step : steps_) {
      if (!step.complete()) return step.describe_unfinished(comm_);
    }
    return "not done";
  }

 private:
  const std::vector<CollectiveHeader>* headers() override {
    return headers_->pending.check(comm_) ? &headers_->all : nullptr;
  }

  void start_step(int64_t /*step*/, const std::vector<Rounds::Message>& sends,
                  const std::vector<Rounds::Message>& receives, const Kept& kept) override {
    Pending& step = steps_.emplace_back(Pending{{}, call_.label});
    for (const Rounds::Message& m : receives) messages_.start(step, false, m.peer, stream_, m.data, m.bytes, kept);
    for (const Rounds::Message& m : sends) messages_.start(step, true, m.peer, stream_, m.data, m.bytes, kept);
  }

  bool finish_step(int64_t /*step*/) override {
    if (!steps_.front().check(comm_)) return false;
    steps_.pop_front();
    return true;
  }

  Messages& messages_;
  Stream stream_;
  std::shared_ptr<Headers> headers_;
  std::deque<Pending> steps_;  // that are under way
};

class C10dCommunicator final : public CommunicatorBackend {
 public:
  // members: its ranks by their numbers in the group. context: the number that these ranks have agreed on.
  C10dCommunicator(std::shared_ptr<Channel> channel, std::vector<int> members, int rank, int64_t context)
      : CommunicatorBackend(rank, static_cast<int>(members.size()), at::kCPU),
        messages_(*this, std::move(channel), std::move(members), context) {}

  ~C10dCommunicator() override {
    const std::unique_lock lock(arrivals().mutex);
    abandon();
  }

  std::string_view backend() const override { return "c10d"; }
  int in_job(int rank) const override { return messages_.channel()->in_job(messages_.in_group(rank)); }

  void progress() override {
    if (failed()) return;
    const std::lock_guard lock(arrivals().mutex);
    advance_begun();
  }

  int64_t reduce_scatter_holds(int64_t payload) const override {
    return messages_hold(hosts_.groups(), rank_, payload);
  }

 protected:
  // A forked process has neither the threads that wait nor those of gloo.
  void before_operation(OpLabel label) override {
    if (getpid() == process_) return;
    throw Error(ErrorKind::kUsage, "comm",
                where(label) +
                    ": this process was forked after its parent had made this communicator, and only the parent can "
                    "use the connections of a process group: communicate in the parent only, or start processes with "
                    "the start method \"spawn\" of multiprocessing");
  }

  std::vector<CollectiveHeader> gather_headers(const CollectiveHeader& mine, const at::Tensor&, OpLabel label) override;
  std::unique_ptr<StartedOperation> start_exchange(const std::vector<Message>& sends,
                                                   const std::vector<Message>& receives, OpLabel label) override;
  std::unique_ptr<StartedOperation> start_all_reduce(at::Tensor& tensor, ReduceOp op, OpLabel label) override;
  std::unique_ptr<StartedOperation> start_broadcast(at::Tensor& tensor, int root, OpLabel label) override;
  std::unique_ptr<StartedOperation> begin(const Begun& call) override;
  std::unique_ptr<Communicator> make_split(int color, int key, OpLabel label) override;

 private:
  class Operation;
  class Transfers;
  class BegunOperation;

  // Makes the communicator dead. The group may still use the buffers of operations that are under way, so they are
  // never freed. The caller holds arrivals().mutex.
  void die(const std::string& why) {
    if (failed()) return;
    fail(ErrorKind::kComm, why, /*raised=*/true);
    abandon();
  }

  void abandon() {
    abandon_all(begun_collectives(), *this);
    messages_.abandon();
  }

  // Runs `body`, which starts messages. If it fails, the communicator is dead.
  template <typename Body>
  void start(OpLabel label, Body body) {
    const std::lock_guard lock(arrivals().mutex);
    try {
      body();
    } catch (const Error& e) {
      const std::string why = "the process group refused a message: " + std::string(e.message());
      die(where(label) + ": " + why);
      throw_comm(label, why);
    }
  }

  std::shared_ptr<Headers> start_headers(const CollectiveHeader& mine, OpLabel label) {
    const auto headers = std::make_shared<Headers>(Headers{{{}, label, "waiting for all ranks"}, mine, {}});
    start(label, [&] { messages_.start_headers(headers); });
    return headers;
  }

  void exchange_all(OpLabel label, const char* name, const Deadline& deadline, const PartOf& from, const PartOf& to,
                    const Kept& kept);

  Messages messages_;
  pid_t process_ = getpid();
};

// What was started: messages, or a collective that was begun.
class C10dCommunicator::Operation : public StartedOperation {
 public:
  bool test() final {
    {
      const std::lock_guard lock(arrivals().mutex);
      if (poll()) return true;
    }
    return deadline_.passed() && wait();  // wait() polls once more, then raises
  }

  bool wait() final {
    const Waiting waiting(comm_, what_);
    std::unique_lock lock(arrivals().mutex);
    while (!poll()) {
      if (arrivals().arrived.wait_until(lock, deadline_.time) == std::cv_status::no_timeout || poll()) continue;
      const std::string why = missed_deadline(describe_unfinished(), deadline_.timeout);
      comm_.die(where(label_) + ": " + why);
      throw_comm(label_, why);
    }
    return true;
  }

  void abandon() final {
    const std::lock_guard lock(arrivals().mutex);
    if (!complete()) comm_.die(where(label_) + ": abandoned after another error");
  }

 protected:
  Operation(C10dCommunicator& comm, OpLabel label, WaitFor what, const Deadline& deadline)
      : comm_(comm), label_(label), what_(what), deadline_(deadline) {}

  // Returns true when the operation is complete, and raises if it never will be. The caller holds arrivals().mutex.
  virtual bool poll() = 0;
  virtual bool complete() const = 0;
  virtual std::string describe_unfinished() const = 0;

  C10dCommunicator& comm_;
  OpLabel label_;
  WaitFor what_;
  Deadline deadline_;
};

class C10dCommunicator::Transfers final : public Operation {
 public:
  Transfers(C10dCommunicator& comm, PendingPtr pending, WaitFor what, const Deadline& deadline)
      : Operation(comm, pending->label, what, deadline), pending_(std::move(pending)) {}

 private:
  // After a failure the communicator is dead.
  bool poll() override {
    if (complete()) return true;
    advance_begun();
    try {
      pending_->check(comm_);
    } catch (const Error& e) {
      comm_.die(std::string(e.message()));
      throw;
    }
    comm_.check_alive(label_);
    return false;
  }
  bool complete() const override { return pending_->complete(); }
  std::string describe_unfinished() const override { return pending_->describe_unfinished(comm_); }

  PendingPtr pending_;
};

class C10dCommunicator::BegunOperation final : public Operation {
 public:
  BegunOperation(C10dCommunicator& comm, const Begun& call, std::shared_ptr<BegunCollective> begun,
                 const Deadline& deadline)
      : Operation(comm, call.label, wait_for(call), deadline), begun_(std::move(begun)) {}

 private:
  bool poll() override {
    advance_begun();
    try {
      if (begun_->check()) return true;
    } catch (const Error& e) {
      // Ranks that disagree have sent no data, so the communicator stays usable.
      if (e.kind() != ErrorKind::kMismatch) comm_.die(std::string(e.message()));
      throw;
    }
    comm_.check_alive(label_);
    return false;
  }
  bool complete() const override { return begun_->complete(); }
  std::string describe_unfinished() const override { return begun_->describe_unfinished(); }

  std::shared_ptr<BegunCollective> begun_;
};

std::vector<CollectiveHeader> C10dCommunicator::gather_headers(const CollectiveHeader& mine, const at::Tensor&,
                                                               OpLabel label) {
  const Deadline deadline(timeout_);
  const std::shared_ptr<Headers> headers = start_headers(mine, label);
  Transfers(*this, PendingPtr(headers, &headers->pending), blocked_by(), deadline).wait();
  return headers->all;
}

// Exchanges the messages of a blocking collective, and waits for them.
void C10dCommunicator::exchange_all(OpLabel label, const char* name, const Deadline& deadline, const PartOf& from,
                                    const PartOf& to, const Kept& kept) {
  const auto pending = std::make_shared<Pending>(Pending{{}, label, name});
  start(label, [&] { messages_.start_with_all(*pending, Lane::kBlocking, from, to, kept); });
  Transfers(*this, pending, blocked_by(), deadline).wait();
}

std::unique_ptr<StartedOperation> C10dCommunicator::start_exchange(const std::vector<Message>& sends,
                                                                   const std::vector<Message>& receives,
                                                                   OpLabel label) {
  const auto pending = std::make_shared<Pending>(Pending{{}, label});
  const Deadline deadline(timeout_);
  start(label, [&] { messages_.start_exchange(*pending, sends, receives); });
  return std::make_unique<Transfers>(*this, pending, WaitFor::kExchange, deadline);
}

std::unique_ptr<StartedOperation> C10dCommunicator::begin(const Begun& call) {
  const Deadline deadline(timeout_);
  const auto begun =
      std::make_shared<C10dBegunCollective>(*this, messages_, call, start_headers(call.header, call.label));
  const std::lock_guard lock(arrivals().mutex);
  begun_collectives().push_back(begun);
  return std::make_unique<BegunOperation>(*this, call, begun, deadline);
}

// Adds in the order of the ranks. A small tensor is sent to every rank. A larger one is reduced in segments: each rank
// adds up a part of the segment and sends the sum to the others.
std::unique_ptr<StartedOperation> C10dCommunicator::start_all_reduce(at::Tensor& tensor, ReduceOp op, OpLabel label) {
  constexpr int64_t kWhole = 4096, kSegment = int64_t{8} << 20;  // bytes
  if (size_ == 1) return nullptr;
  const Deadline deadline(timeout_);
  const int64_t width = tensor.element_size(), total = tensor.numel();
  const bool whole = total * width <= kWhole;
  const int64_t segment = std::min(total, kSegment / width);
  const int64_t part = whole ? total : (segment + size_ - 1) / size_;
  struct Buffers {
    at::Tensor tensor, held;  // held: the other ranks' values of this rank's part
  };
  const auto buffers = std::make_shared<Buffers>();
  *buffers = {tensor, pool_tensor({size_, part * width}, at::kByte, PoolPurpose::kGradients)};
  auto* held = static_cast<char*>(buffers->held.mutable_data_ptr());
  for (int64_t begin = 0; begin < total; begin += segment) {
    char* data = static_cast<char*>(tensor.mutable_data_ptr()) + begin * width;
    const int64_t here = std::min(segment, total - begin);
    // The part that a rank adds up.
    const auto part_of = [&](int rank) {
      if (whole) return Part{data, here * width};
      const int64_t first = std::min(here, rank * part);
      return Part{data + first * width, std::min(part, here - first) * width};
    };
    const Part mine = part_of(rank_);
    exchange_all(
        label, "all_reduce", deadline, part_of,
        [&](int peer) {
          return Part{held + peer * part * width, mine.bytes};
        },
        buffers);
    std::vector<const void*> from;
    for (int r = 0; r < size_; ++r) from.push_back(r == rank_ ? mine.data : held + r * part * width);
    reduce_in_rank_order(tensor.scalar_type(), op, const_cast<void*>(mine.data), from, mine.bytes / width,
                         RankGroups({size_}));
    if (whole) return nullptr;
    exchange_all(
        label, "all_reduce", deadline, [&](int) { return mine; }, part_of, buffers);
  }
  return nullptr;
}

std::unique_ptr<StartedOperation> C10dCommunicator::start_broadcast(at::Tensor& tensor, int root, OpLabel label) {
  const Part all{tensor.mutable_data_ptr(), static_cast<int64_t>(tensor.nbytes())};
  exchange_all(
      label, "broadcast", Deadline(timeout_), [&](int) { return rank_ == root ? all : Part(); },
      [&](int peer) { return peer == root ? all : Part(); }, std::make_shared<at::Tensor>(tensor));
  return nullptr;
}

std::unique_ptr<Communicator> C10dCommunicator::make_split(int color, int key, OpLabel label) {
  struct Choice {
    int64_t color = 0, key = 0, context = 0;
  };
  const auto choices = std::make_shared<std::vector<Choice>>(static_cast<size_t>(size_));
  const auto choice_of = [&](int rank) { return Part{&(*choices)[static_cast<size_t>(rank)], sizeof(Choice)}; };
  Channel& channel = *messages_.channel();
  {
    const std::lock_guard lock(arrivals().mutex);
    (*choices)[static_cast<size_t>(rank_)] = {color, key, channel.contexts().next};
  }
  exchange_all(
      label, "split", Deadline(timeout_), [&](int) { return choice_of(rank_); }, choice_of, choices);
  int64_t context = 0;  // one that none of these ranks has used yet
  for (const Choice& choice : *choices) context = std::max(context, choice.context);
  {
    const std::lock_guard lock(arrivals().mutex);
    channel.contexts().next = std::max(channel.contexts().next, context + 1);
  }
  if (color < 0) return nullptr;
  std::vector<int> joined;  // by their numbers in this communicator
  for (int r = 0; r < size_; ++r) {
    if ((*choices)[static_cast<size_t>(r)].color == color) joined.push_back(r);
  }
  std::stable_sort(joined.begin(), joined.end(), [&](int a, int b) {
    return (*choices)[static_cast<size_t>(a)].key < (*choices)[static_cast<size_t>(b)].key;
  });
  const auto rank = static_cast<int>(std::find(joined.begin(), joined.end(), rank_) - joined.begin());
  for (int& member : joined) member = messages_.in_group(member);
  return std::make_unique<C10dCommunicator>(messages_.channel(), std::move(joined), rank, context);
}

}  // namespace

std::unique_ptr<Communicator> make_host_communicator(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                                     Seconds timeout) {
  const auto channel = std::make_shared<Channel>(group);
  const auto fail = [&](ErrorKind kind, const std::string& why) {
    throw Error(kind, "comm", "making a communicator over process group \"" + channel->name() + "\": " + why);
  };
  // Every communicator over the group is split off this one, which has context 0.
  std::vector<int> members(static_cast<size_t>(channel->size()));
  std::iota(members.begin(), members.end(), 0);
  C10dCommunicator all(channel, std::move(members), channel->rank(), 0);
  all.set_timeout(timeout);
  std::string& broken = channel->contexts().broken;
  if (!broken.empty()) fail(ErrorKind::kComm, "an earlier one could not be made: " + broken);
  try {
    std::unique_ptr<Communicator> comm = all.split(0, 0, {});
    comm->set_hosts(numbered(all_gather_text(*comm, host_identity(), {"hosts of the process group"})));
    return comm;
  } catch (const Error& e) {
    broken = e.message();
    fail(e.kind(), broken);
    throw;
  }
}

}  // namespace annulus::c10d_internal

namespace annulus {

std::shared_ptr<Communicator> make_c10d_communicator(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                                     at::Device device, Seconds timeout) {
  std::unique_ptr<Communicator> host = c10d_internal::make_host_communicator(group, timeout);
  if (device.is_cpu()) return host;
  return c10d_internal::make_device_communicator(group, device, std::move(host));
}

}  // namespace annulus
