// The part of the backend over process groups that carries CPU tensors.
//
// - All data travel as messages between two ranks (channel.h), never by the group's own collectives: a group cannot
//   abandon a collective that some ranks do not join, and the program's own collectives would be ordered with these.
// - A communicator has a context, a number that its ranks agree on and that is part of the tags. So the messages of
//   several communicators over one group, such as splits, are never confused.
// - Before a collective every rank sends its header to every other, so that a missing rank can be named and ranks that
//   disagree all notice before any data are sent. Blocking reductions add in the order of the ranks as well.
#include "comm/c10d/c10d_communicator.h"

#include <ATen/ops/empty.h>

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <numeric>
#include <utility>

#include "comm/c10d/begun_collective.h"
#include "comm/c10d/channel.h"
#include "comm/c10d/internal.h"
#include "comm/checks.h"
#include "comm/deadline.h"
#include "comm/headers.h"
#include "comm/hosts.h"
#include "comm/rank_order.h"
#include "common/error.h"
#include "common/logging/log.h"
#include "common/text.h"

namespace annulus::c10d_internal {
namespace {

using namespace comm_internal;

using PendingPtr = std::shared_ptr<Pending>;

// The memory of a message to or from a rank. With 0 bytes there is no message.
struct Part {
  const void* data = nullptr;
  int64_t bytes = 0;
};
using PartOf = std::function<Part(int rank)>;

class C10dCommunicator final : public Communicator, private Sender {
 public:
  // members: its ranks by their numbers in the group. context: the number that these ranks have agreed on.
  C10dCommunicator(std::shared_ptr<Channel> channel, std::vector<int> members, int rank, int64_t context)
      : Communicator(rank, static_cast<int>(members.size()), at::kCPU),
        channel_(std::move(channel)),
        members_(std::move(members)),
        context_(context),
        sent_(members_.size(), 0),
        received_(members_.size(), 0) {}

  ~C10dCommunicator() override {
    const std::unique_lock lock(arrivals().mutex);
    drop_all();
  }

  std::string_view backend() const override { return "c10d"; }
  int in_job(int rank) const override { return channel_->in_job(members_[static_cast<size_t>(rank)]); }

  void progress() override {
    if (failed()) return;
    const std::lock_guard lock(arrivals().mutex);
    advance_all();
  }

  int64_t reduce_scatter_holds(int64_t payload) const override {
    return messages_hold(hosts_.groups(), rank_, payload);
  }

 protected:
  // A forked process has neither the threads that wait nor those of gloo.
  void look(OpLabel label) override {
    if (getpid() == process_) return;
    throw Error(ErrorKind::kUsage, "comm",
                where(label) +
                    ": this process was forked after its parent had made this communicator, and only the parent can "
                    "use the connections of a process group: communicate in the parent only, or start processes with "
                    "the start method \"spawn\" of multiprocessing");
  }

  std::vector<CollectiveHeader> gather_headers(const CollectiveHeader& mine, const at::Tensor&,
                                               OpLabel label) override {
    const auto deadline = deadline_of(timeout_);
    const std::shared_ptr<Headers> headers = post_headers(mine, label);
    wait(std::shared_ptr<Pending>(headers, &headers->pending), deadline, timeout_, blocked_by());
    return headers->all;
  }

  std::unique_ptr<Work> start_exchange(const std::vector<Message>& sends, const std::vector<Message>& receives,
                                       OpLabel label) override;
  std::unique_ptr<Work> start_all_reduce(at::Tensor& tensor, ReduceOp op, OpLabel label) override;
  std::unique_ptr<Work> start_broadcast(at::Tensor& tensor, int root, OpLabel label) override;
  std::unique_ptr<Work> begin(const Begun& call) override;
  std::unique_ptr<Communicator> make_split(int color, int key, OpLabel label) override;

 private:
  template <typename Started>
  friend class C10dWork;

  Channel::Address address(int peer) const { return {members_[static_cast<size_t>(peer)], peer, context_}; }

  // Makes the communicator dead. The group may still use the buffers of operations that are under way, so they are
  // never freed. The caller holds arrivals().mutex.
  void die(const std::string& why) {
    if (failed()) return;
    fail(ErrorKind::kComm, why, /*told=*/true);
    drop_all();
  }

  void drop_all() {
    std::erase_if(begun_collectives(), [this](const BegunPtr& begun) {
      if (&begun->comm() != this) return false;
      [[maybe_unused]] const auto* leaked = new BegunPtr(begun);
      return true;
    });
    for (const TransferPtr& transfer : std::exchange(open_, {})) Channel::abandon(transfer);
  }

  void remember(Pending& pending, TransferPtr transfer) {
    open_.push_back(transfer);
    pending.transfers.push_back(std::move(transfer));
  }

  // Runs `body`, which posts messages. If it fails, the communicator is dead.
  template <typename Body>
  void start(OpLabel label, Body body) {
    std::erase_if(open_, [](const TransferPtr& transfer) { return transfer->done; });
    try {
      body();
    } catch (const Error& e) {
      const std::string why = "the process group refused a message: " + std::string(e.message());
      die(where(label) + ": " + why);
      throw_comm(label, why);
    }
  }

  // Posts messages to and from every other rank. The caller holds arrivals().mutex, for all functions named post.
  void post(Pending& pending, Lane lane, const PartOf& from, const PartOf& to, const Kept& kept) {
    for (const bool is_send : {false, true}) {
      for (int i = 1; i < size_; ++i) {
        const int peer = is_send ? (rank_ + i) % size_ : (rank_ + size_ - i) % size_;
        const Part part = (is_send ? from : to)(peer);
        if (part.bytes > 0) post(pending, is_send, peer, lane, const_cast<void*>(part.data), part.bytes, kept);
      }
    }
  }

  void post(Pending& pending, const std::vector<Rounds::Message>& sends, const std::vector<Rounds::Message>& receives,
            const Kept& kept) override {
    for (const Rounds::Message& m : receives) post(pending, false, m.peer, Lane::kBegun, m.data, m.bytes, kept);
    for (const Rounds::Message& m : sends) post(pending, true, m.peer, Lane::kBegun, m.data, m.bytes, kept);
  }

  void post(Pending& pending, bool is_send, int peer, Lane lane, void* data, int64_t bytes, const Kept& kept) {
    remember(pending, is_send ? channel_->send(address(peer), lane, data, bytes, kept)
                              : channel_->receive(address(peer), lane, data, bytes, kept));
  }

  std::shared_ptr<Headers> post_headers(const CollectiveHeader& mine, OpLabel label) {
    auto headers = std::make_shared<Headers>();
    headers->mine = mine;
    headers->all.resize(static_cast<size_t>(size_));
    headers->all[static_cast<size_t>(rank_)] = mine;
    headers->pending.label = label;
    headers->pending.collective = "waiting for all ranks";
    const std::lock_guard lock(arrivals().mutex);
    start(label, [&] {
      post(
          headers->pending, Lane::kHeaders,
          [&](int) {
            return Part{&headers->mine, sizeof mine};
          },
          [&](int peer) {
            return Part{&headers->all[static_cast<size_t>(peer)], sizeof mine};
          },
          headers);
    });
    return headers;
  }

  // Exchanges the messages of a blocking collective, and waits for them.
  void exchange_all(OpLabel label, const char* name, Clock::time_point deadline, const PartOf& from, const PartOf& to,
                    const Kept& kept) {
    const auto pending = std::make_shared<Pending>(Pending{{}, label, name});
    {
      const std::lock_guard lock(arrivals().mutex);
      start(label, [&] { post(*pending, Lane::kBlocking, from, to, kept); });
    }
    wait(pending, deadline, timeout_, blocked_by());
  }

  // Returns true when all are done. After a failure the communicator is dead. The caller holds arrivals().mutex.
  bool test(const PendingPtr& pending) {
    if (pending->over()) return true;
    advance_all();
    try {
      pending->raise(*this);
    } catch (const Error& e) {
      die(std::string(e.message()));
      throw;
    }
    check_alive(pending->label);
    return false;
  }

  bool test(const BegunPtr& begun) {
    advance_all();
    if (begun->complete()) return true;
    try {
      if (begun->failure()) std::rethrow_exception(begun->failure());
    } catch (const Error& e) {
      // Ranks that disagree have sent no data, so the communicator stays usable.
      if (e.kind() != ErrorKind::kMismatch) die(std::string(e.message()));
      throw;
    }
    check_alive(begun->label());
    return false;
  }

  static bool over(const Pending& pending) { return pending.over(); }
  static bool over(const BegunCollective& begun) { return begun.complete(); }
  static OpLabel label_of(const Pending& pending) { return pending.label; }
  static OpLabel label_of(const BegunCollective& begun) { return begun.label(); }
  std::string unfinished(const Pending& pending) const { return pending.describe_unfinished(*this); }
  static std::string unfinished(const BegunCollective& begun) { return begun.describe_unfinished(); }
  static WaitFor waits_for(const Pending&) { return WaitFor::kExchange; }
  static WaitFor waits_for(const BegunCollective& begun) {
    return begun.reduces() ? WaitFor::kReduce : WaitFor::kGather;
  }

  template <typename Started>
  void wait(const std::shared_ptr<Started>& started, Clock::time_point deadline, Seconds timeout, WaitFor what) {
    const Waiting waiting(*this, what);
    std::unique_lock lock(arrivals().mutex);
    while (!test(started)) {
      if (arrivals().came.wait_until(lock, deadline) == std::cv_status::no_timeout || test(started)) continue;
      const OpLabel label = label_of(*started);
      const std::string why = unfinished(*started) + " within " + describe_seconds(timeout.count());
      die(where(label) + ": " + why);
      throw_comm(label, why);
    }
  }

  void match_own_messages();

  std::shared_ptr<Channel> channel_;
  std::vector<int> members_;
  int64_t context_;
  pid_t process_ = getpid();
  std::vector<int64_t> sent_;  // the number of messages so far, by peer
  std::vector<int64_t> received_;
  std::vector<TransferPtr> open_;  // all transfers that may not be done
  // Messages from this rank to itself that wait for the other end, in order.
  struct Own {
    TransferPtr transfer;
    Channel::Described message;
  };
  std::deque<Own> own_sends_, own_receives_;
};

template <typename Started>
class C10dWork final : public Work {
 public:
  C10dWork(C10dCommunicator& comm, std::shared_ptr<Started> started, Clock::time_point deadline)
      : comm_(comm),
        started_(std::move(started)),
        deadline_(deadline),
        timeout_(comm.timeout()),
        exceptions_(std::uncaught_exceptions()) {}

  ~C10dWork() override {
    if (!started_) return;
    if (std::uncaught_exceptions() > exceptions_) {
      const std::lock_guard lock(arrivals().mutex);
      if (comm_.over(*started_)) return;
      comm_.die(where(comm_.label_of(*started_)) + ": abandoned after another error");
      return;
    }
    try {
      wait();
    } catch (const std::exception& e) {
      log_error(e, comm_.in_job(comm_.rank()));
    }
  }

  bool test() override {
    if (!started_) return true;
    // If this raises, the Work is over: started_ stays null.
    const std::shared_ptr<Started> started = std::exchange(started_, nullptr);
    {
      const std::lock_guard lock(arrivals().mutex);
      if (comm_.test(started)) return true;
    }
    started_ = started;
    if (Clock::now() >= deadline_) wait();  // tests once more, then raises
    return !started_;
  }

  void wait() override {
    if (const std::shared_ptr<Started> started = std::exchange(started_, nullptr)) {
      comm_.wait(started, deadline_, timeout_, comm_.waits_for(*started));
    }
  }

 private:
  C10dCommunicator& comm_;
  std::shared_ptr<Started> started_;  // null once it is over
  Clock::time_point deadline_;
  Seconds timeout_;
  int exceptions_;
};

// Carries messages from this rank to itself, in order. The caller holds arrivals().mutex.
void C10dCommunicator::match_own_messages() {
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

std::unique_ptr<Work> C10dCommunicator::start_exchange(const std::vector<Message>& sends,
                                                       const std::vector<Message>& receives, OpLabel label) {
  const auto pending = std::make_shared<Pending>();
  pending->label = label;
  const auto deadline = deadline_of(timeout_);
  const auto post_message = [&](const Message& message, bool is_send) {
    const int64_t number = (is_send ? sent_ : received_)[static_cast<size_t>(message.peer)]++;
    const auto bytes = static_cast<int64_t>(message.tensor.nbytes());
    if (bytes == 0) return;  // it is counted, so that a peer that expects data notices the missing message
    const Channel::Described described{message.tensor, number};
    if (message.peer != rank_) {
      const Channel::Address peer = address(message.peer);
      remember(*pending, is_send ? channel_->send(peer, described) : channel_->receive(peer, described));
      return;
    }
    const auto transfer = std::make_shared<Transfer>();
    static_cast<TransferState&>(*transfer) = {message.peer, is_send, bytes};
    pending->transfers.push_back(transfer);
    (is_send ? own_sends_ : own_receives_).push_back({transfer, described});
  };
  const std::lock_guard lock(arrivals().mutex);
  start(label, [&] {
    for (const Message& message : receives) post_message(message, false);
    for (const Message& message : sends) post_message(message, true);
    match_own_messages();
  });
  return std::make_unique<C10dWork<Pending>>(*this, pending, deadline);
}

std::unique_ptr<Work> C10dCommunicator::begin(const Begun& call) {
  const auto deadline = deadline_of(timeout_);
  const auto begun = std::make_shared<BegunCollective>(*this, static_cast<Sender&>(*this), call,
                                                       post_headers(call.header, call.label));
  const std::lock_guard lock(arrivals().mutex);
  begun_collectives().push_back(begun);
  return std::make_unique<C10dWork<BegunCollective>>(*this, begun, deadline);
}

// Adds in the order of the ranks. A small tensor is sent to every rank. A larger one is reduced in segments: each rank
// adds up a part of the segment and sends the sum to the others.
std::unique_ptr<Work> C10dCommunicator::start_all_reduce(at::Tensor& tensor, ReduceOp op, OpLabel label) {
  constexpr int64_t kWhole = 4096, kSegment = int64_t{8} << 20;  // bytes
  if (size_ == 1) return nullptr;
  const auto deadline = deadline_of(timeout_);
  const int64_t width = tensor.element_size(), total = tensor.numel();
  const bool whole = total * width <= kWhole;
  const int64_t segment = std::min(total, kSegment / width);
  const int64_t part = whole ? total : (segment + size_ - 1) / size_;
  struct Buffers {
    at::Tensor tensor, held;  // held: the other ranks' values of this rank's part
  };
  const auto buffers = std::make_shared<Buffers>();
  *buffers = {tensor, at::empty({size_, part * width}, at::kByte)};
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

std::unique_ptr<Work> C10dCommunicator::start_broadcast(at::Tensor& tensor, int root, OpLabel label) {
  const Part all{tensor.mutable_data_ptr(), static_cast<int64_t>(tensor.nbytes())};
  exchange_all(
      label, "broadcast", deadline_of(timeout_), [&](int) { return rank_ == root ? all : Part(); },
      [&](int peer) { return peer == root ? all : Part(); }, std::make_shared<at::Tensor>(tensor));
  return nullptr;
}

std::unique_ptr<Communicator> C10dCommunicator::make_split(int color, int key, OpLabel label) {
  struct Choice {
    int64_t color = 0, key = 0, context = 0;
  };
  const auto choices = std::make_shared<std::vector<Choice>>(static_cast<size_t>(size_));
  const auto choice_of = [&](int rank) { return Part{&(*choices)[static_cast<size_t>(rank)], sizeof(Choice)}; };
  {
    const std::lock_guard lock(arrivals().mutex);
    (*choices)[static_cast<size_t>(rank_)] = {color, key, channel_->contexts().next};
  }
  exchange_all(
      label, "split", deadline_of(timeout_), [&](int) { return choice_of(rank_); }, choice_of, choices);
  int64_t context = 0;  // one that none of these ranks has used yet
  for (const Choice& choice : *choices) context = std::max(context, choice.context);
  {
    const std::lock_guard lock(arrivals().mutex);
    channel_->contexts().next = std::max(channel_->contexts().next, context + 1);
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
  for (int& member : joined) member = members_[static_cast<size_t>(member)];
  return std::make_unique<C10dCommunicator>(channel_, std::move(joined), rank, context);
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
    std::unique_ptr<Communicator> comm = all.split(0, 0);
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
