// The threads backend. All ranks of a run share one mutex; a transfer is copied straight from the sender's tensor into
// the receiver's by whichever side comes second, outside the mutex. That the sender's tensor must not change meanwhile
// is so as visible to a thread sanitizer as it is real with MPI.
#include "comm/threads/threads.h"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "comm/checks.h"
#include "common/error.h"

namespace annulus {
namespace {

using namespace comm_internal;
using Clock = std::chrono::steady_clock;

Clock::time_point deadline_of(Seconds timeout) {
  // A year is for ever; more would overflow the clock.
  const double seconds = std::clamp(timeout.count(), 0.0, 365.0 * 86400);
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(Seconds(seconds));
}

std::string what_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "unknown exception";
  }
}

// Raised where a wait fails because of another rank: run_ranks prefers to report that rank's own error.
class PeerFailed final : public Error {
 public:
  PeerFailed(OpLabel label, const std::string& message)
      : Error(ErrorKind::kComm, "comm", where(label) + ": " + message) {}
};

// Everything that the ranks of one run share, whatever communicator they use. Guarded by mutex.
struct World {
  explicit World(int n) : wake(static_cast<size_t>(n)), ended(static_cast<size_t>(n), false) {}
  std::mutex mutex;
  std::deque<std::condition_variable> wake;  // one a rank
  std::vector<bool> ended;                   // the rank's function returned
  int failed_rank = -1;                      // the first that threw
  std::exception_ptr failure;                // of the first that failed by itself, else the first
  bool failure_is_own = false;
  std::string failure_text;

  void wake_all() {
    for (std::condition_variable& cv : wake) cv.notify_all();
  }
};

// One posted send or receive.
struct Transfer {
  enum class State { kPosted, kCopying, kDone, kFailed };
  at::Tensor tensor;  // held until the transfer is done: a peer may be copying
  int self = 0;       // ranks of the group
  int peer = 0;
  bool is_send = false;
  size_t bytes = 0;
  std::string operation;
  int64_t step = 0;
  State state = State::kPosted;
  std::string error;
};

// One meeting of all ranks of a group: what each has brought.
struct Meeting {
  struct Item {
    CollectiveHeader header;
    at::Tensor tensor;
    std::shared_ptr<void> extra;
    int color = 0;
    int key = 0;
  };
  explicit Meeting(int n) : items(static_cast<size_t>(n)), here(static_cast<size_t>(n), false) {}
  std::vector<Item> items;
  std::vector<bool> here;
  int arrived = 0;
};

// The shared part of one communicator. Guarded by world->mutex.
struct Group {
  Group(std::shared_ptr<World> w, std::vector<int> ranks) : world(std::move(w)), world_rank(std::move(ranks)) {}
  int size() const { return static_cast<int>(world_rank.size()); }

  std::shared_ptr<World> world;
  std::vector<int> world_rank;
  std::string dead;  // why, once a transfer has failed
  // Posted and not yet matched, by (sender, receiver).
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Transfer>>> sends;
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Transfer>>> receives;
  std::map<int64_t, std::shared_ptr<Meeting>> meetings;  // by number, until all have arrived
};

void kill_group(Group& group, const std::string& why) {
  if (group.dead.empty()) group.dead = why;
  group.world->wake_all();
}

// Why no wait of this group can succeed any more, or nothing.
std::optional<std::string> hopeless(const Group& group) {
  const World& world = *group.world;
  if (world.failed_rank >= 0) {
    return "rank " + std::to_string(world.failed_rank) + " failed: " + world.failure_text;
  }
  if (!group.dead.empty()) return "the communicator is dead: " + group.dead;
  return std::nullopt;
}

std::string describe(const Transfer& transfer) {
  return transfer.is_send
             ? "sending " + std::to_string(transfer.bytes) + " bytes to rank " + std::to_string(transfer.peer)
             : "receiving " + std::to_string(transfer.bytes) + " bytes from rank " + std::to_string(transfer.peer);
}

class ThreadWork;

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<Group> group, int rank)
      : Communicator(rank, group->size()), group_(std::move(group)) {}

  std::string_view backend() const override { return "threads"; }

  std::unique_ptr<Work> exchange(const std::vector<Message>& sends, const std::vector<Message>& receives,
                                 OpLabel label) override;

  void all_reduce(at::Tensor& tensor, ReduceOp op, OpLabel label) override {
    check_tensor(tensor, at::kCPU, backend(), "tensor", label);
    check_reducible(tensor, backend(), label);
    const auto meeting = meet(Collective::kAllReduce, &tensor, static_cast<int>(op), -1, label);
    // Each rank reduces one slice, in rank order; then all copy all slices.
    const int64_t n = tensor.numel();
    const int64_t begin = n * rank_ / size_;
    const int64_t end = n * (rank_ + 1) / size_;
    at::Tensor part = at::empty({end - begin}, tensor.options());
    for (int r = 0; r < size_; ++r) {
      reduce_into(part, item_tensor(*meeting, r), begin, op, r == 0);
    }
    const auto parts = gather_again(part, label);
    const int64_t width = tensor.element_size();
    char* out = static_cast<char*>(tensor.mutable_data_ptr());
    for (int r = 0; r < size_; ++r) {
      const at::Tensor& slice = item_tensor(*parts, r);
      if (slice.numel() == 0) continue;
      std::memcpy(out + n * r / size_ * width, slice.const_data_ptr(), slice.nbytes());
    }
    count(size_ - 1, tensor.nbytes());
  }

  void all_gather(at::Tensor& out, const at::Tensor& in, OpLabel label) override {
    check_tensor(in, at::kCPU, backend(), "input", label);
    check_tensor(out, at::kCPU, backend(), "output", label);
    check_gather_shapes(out, "output", in, "input", size_, label);
    const auto meeting = meet(Collective::kAllGather, &in, -1, -1, label);
    char* to = static_cast<char*>(out.mutable_data_ptr());
    for (int r = 0; r < size_ && in.nbytes() > 0; ++r) {
      std::memmove(to + static_cast<size_t>(r) * in.nbytes(), item_tensor(*meeting, r).const_data_ptr(), in.nbytes());
    }
    gather_again(at::Tensor(), label);  // nobody's input changes before all have read it
    count(size_ - 1, in.nbytes());
  }

  void reduce_scatter(at::Tensor& out, const at::Tensor& in, OpLabel label) override {
    check_tensor(in, at::kCPU, backend(), "input", label);
    check_tensor(out, at::kCPU, backend(), "output", label);
    check_reducible(in, backend(), label);
    check_gather_shapes(in, "input", out, "output", size_, label);
    const auto meeting = meet(Collective::kReduceScatter, &in, static_cast<int>(ReduceOp::kSum), -1, label);
    at::Tensor sum = at::empty(out.sizes(), out.options());
    for (int r = 0; r < size_; ++r) {
      reduce_into(sum, item_tensor(*meeting, r), out.numel() * rank_, ReduceOp::kSum, r == 0);
    }
    gather_again(at::Tensor(), label);
    if (out.nbytes() > 0) std::memcpy(out.mutable_data_ptr(), sum.const_data_ptr(), out.nbytes());
    count(size_ - 1, out.nbytes());
  }

  void broadcast(at::Tensor& tensor, int root, OpLabel label) override {
    check_tensor(tensor, at::kCPU, backend(), "tensor", label);
    check_root(root, size_, label);
    const auto meeting = meet(Collective::kBroadcast, &tensor, -1, root, label);
    if (rank_ != root && tensor.nbytes() > 0) {
      std::memcpy(tensor.mutable_data_ptr(), item_tensor(*meeting, root).const_data_ptr(), tensor.nbytes());
    }
    gather_again(at::Tensor(), label);
    if (rank_ == root) {
      stats_.messages_sent += size_ - 1;
      stats_.bytes_sent += (size_ - 1) * static_cast<int64_t>(tensor.nbytes());
    } else {
      stats_.messages_received += 1;
      stats_.bytes_received += static_cast<int64_t>(tensor.nbytes());
    }
  }

  void barrier(OpLabel label) override { meet(Collective::kBarrier, nullptr, -1, -1, label); }

  std::unique_ptr<Communicator> split(int color, int key) override {
    const OpLabel label{"split", calls_};
    Meeting::Item item;
    item.header = make_header(Collective::kSplit, calls_++, nullptr, -1, -1, label);
    item.color = color;
    item.key = key;
    const auto meeting = arrive(std::move(item), label);
    require_same_headers(headers(*meeting), label);
    std::vector<std::pair<int, int>> members;  // (key, rank)
    for (int r = 0; r < size_; ++r) {
      const Meeting::Item& other = meeting->items[static_cast<size_t>(r)];
      if (other.color == color) members.emplace_back(other.key, r);
    }
    std::sort(members.begin(), members.end());
    Meeting::Item made;
    if (color >= 0 && members.front().second == rank_) {
      std::vector<int> ranks;
      for (const auto& [k, r] : members) ranks.push_back(group_->world_rank[static_cast<size_t>(r)]);
      made.extra = std::make_shared<Group>(group_->world, std::move(ranks));
    }
    const int maker = members.front().second;
    const auto groups = arrive(std::move(made), label);
    if (color < 0) return nullptr;
    int rank = 0;
    while (members[static_cast<size_t>(rank)].second != rank_) ++rank;
    auto group = std::static_pointer_cast<Group>(groups->items[static_cast<size_t>(maker)].extra);
    auto out = std::make_unique<ThreadCommunicator>(std::move(group), rank);
    out->set_timeout(timeout_);
    return out;
  }

  void progress() override {}

 private:
  friend class ThreadWork;

  static const at::Tensor& item_tensor(const Meeting& meeting, int r) {
    return meeting.items[static_cast<size_t>(r)].tensor;
  }

  static std::vector<CollectiveHeader> headers(const Meeting& meeting) {
    std::vector<CollectiveHeader> out;
    for (const Meeting::Item& item : meeting.items) out.push_back(item.header);
    return out;
  }

  void count(int messages, size_t bytes_each) {
    stats_.messages_sent += messages;
    stats_.messages_received += messages;
    stats_.bytes_sent += messages * static_cast<int64_t>(bytes_each);
    stats_.bytes_received += messages * static_cast<int64_t>(bytes_each);
  }

  std::shared_ptr<Meeting> meet(Collective collective, const at::Tensor* tensor, int op, int root, OpLabel label) {
    Meeting::Item item;
    item.header = make_header(collective, calls_++, tensor, op, root, label);
    if (tensor != nullptr) item.tensor = *tensor;
    const auto meeting = arrive(std::move(item), label);
    require_same_headers(headers(*meeting), label);
    return meeting;
  }

  std::shared_ptr<Meeting> gather_again(at::Tensor tensor, OpLabel label) {
    Meeting::Item item;
    item.tensor = std::move(tensor);
    return arrive(std::move(item), label);
  }

  // Brings item to the group's next meeting and waits until all ranks have come.
  std::shared_ptr<Meeting> arrive(Meeting::Item item, OpLabel label) {
    const auto start = Clock::now();
    const auto deadline = deadline_of(timeout_);
    World& world = *group_->world;
    std::unique_lock<std::mutex> lock(world.mutex);
    if (const auto why = hopeless(*group_)) throw PeerFailed(label, *why);
    const int64_t number = meetings_++;
    std::shared_ptr<Meeting>& slot = group_->meetings[number];
    if (!slot) slot = std::make_shared<Meeting>(size_);
    const std::shared_ptr<Meeting> meeting = slot;
    meeting->items[static_cast<size_t>(rank_)] = std::move(item);
    meeting->here[static_cast<size_t>(rank_)] = true;
    if (++meeting->arrived == size_) {
      group_->meetings.erase(number);
      for (const int r : group_->world_rank) world.wake[static_cast<size_t>(r)].notify_all();
      return meeting;
    }
    std::condition_variable& wake = world.wake[static_cast<size_t>(group_->world_rank[static_cast<size_t>(rank_)])];
    while (meeting->arrived < size_) {
      if (const auto why = hopeless(*group_)) throw PeerFailed(label, *why);
      std::vector<int> missing;
      std::vector<int> gone;
      for (int r = 0; r < size_; ++r) {
        if (meeting->here[static_cast<size_t>(r)]) continue;
        missing.push_back(r);
        if (world.ended[static_cast<size_t>(group_->world_rank[static_cast<size_t>(r)])]) gone.push_back(r);
      }
      std::string why;
      if (!gone.empty()) {
        why = describe_ranks(gone) + " returned without taking part";
      } else if (Clock::now() >= deadline) {
        why = describe_ranks(missing) + " did not come within " + describe_seconds(timeout_.count());
      } else {
        wake.wait_until(lock, deadline);
        continue;
      }
      kill_group(*group_, where(label) + ": " + why);
      throw_comm(label, why);
    }
    stats_.wait_seconds += Seconds(Clock::now() - start).count();
    return meeting;
  }

  template <typename T>
  static void reduce_typed(T* to, const T* from, int64_t n, ReduceOp op, bool first) {
    if (first) {
      std::copy(from, from + n, to);
    } else if (op == ReduceOp::kSum) {
      for (int64_t i = 0; i < n; ++i) to[i] += from[i];
    } else if (op == ReduceOp::kMax) {
      for (int64_t i = 0; i < n; ++i) to[i] = std::max(to[i], from[i]);
    } else {
      for (int64_t i = 0; i < n; ++i) to[i] = std::min(to[i], from[i]);
    }
  }

  // to = to (op) from[begin : begin + to.numel()]
  static void reduce_into(at::Tensor& to, const at::Tensor& from, int64_t begin, ReduceOp op, bool first) {
    const int64_t n = to.numel();
    if (n == 0) return;
    switch (to.scalar_type()) {
      case at::kFloat:
        return reduce_typed(to.mutable_data_ptr<float>(), from.const_data_ptr<float>() + begin, n, op, first);
      case at::kDouble:
        return reduce_typed(to.mutable_data_ptr<double>(), from.const_data_ptr<double>() + begin, n, op, first);
      default:
        return reduce_typed(to.mutable_data_ptr<int64_t>(), from.const_data_ptr<int64_t>() + begin, n, op, first);
    }
  }

  std::shared_ptr<Group> group_;
  int64_t calls_ = 0;     // collectives, in the headers
  int64_t meetings_ = 0;  // meetings of this group so far
};

class ThreadWork final : public Work {
 public:
  ThreadWork(ThreadCommunicator& comm, std::vector<std::shared_ptr<Transfer>> transfers, OpLabel label)
      : comm_(comm),
        group_(comm.group_),
        transfers_(std::move(transfers)),
        label_(label),
        deadline_(deadline_of(comm.timeout_)),
        timeout_(comm.timeout_),
        exceptions_(std::uncaught_exceptions()) {}

  ~ThreadWork() override {
    if (finished_) return;
    if (std::uncaught_exceptions() > exceptions_) {
      std::lock_guard<std::mutex> lock(group_->world->mutex);
      if (!all_done()) kill_group(*group_, where(label_) + ": abandoned by rank " + std::to_string(comm_.rank()));
      return;
    }
    try {
      wait();
    } catch (const std::exception& e) {
      std::fprintf(stderr, "rank %d: %s\n", comm_.rank(), e.what());
    }
  }

  bool test() override {
    if (finished_) return true;
    std::unique_lock<std::mutex> lock(group_->world->mutex);
    return step();
  }

  void wait() override {
    if (finished_) return;
    const auto start = Clock::now();
    World& world = *group_->world;
    const int me = group_->world_rank[static_cast<size_t>(comm_.rank())];
    std::unique_lock<std::mutex> lock(world.mutex);
    while (!step()) world.wake[static_cast<size_t>(me)].wait_until(lock, deadline_);
    lock.unlock();
    comm_.stats_.wait_seconds += Seconds(Clock::now() - start).count();
  }

 private:
  bool all_done() const {
    return std::all_of(transfers_.begin(), transfers_.end(),
                       [](const auto& t) { return t->state == Transfer::State::kDone; });
  }

  // True when complete; raises when it never will be. The mutex is held.
  bool step() {
    const Transfer* pending = nullptr;
    for (const auto& transfer : transfers_) {
      if (transfer->state == Transfer::State::kFailed) {
        finished_ = true;
        throw_mismatch(label_, transfer->error);
      }
      if (transfer->state == Transfer::State::kPosted && pending == nullptr) pending = transfer.get();
    }
    if (all_done()) {
      finished_ = true;
      return true;
    }
    if (pending == nullptr) return false;  // a peer is copying: soon done
    if (const auto why = hopeless(*group_)) {
      finished_ = true;
      throw PeerFailed(label_, describe(*pending) + ": " + *why);
    }
    const World& world = *group_->world;
    std::string why;
    for (const auto& transfer : transfers_) {
      const int peer = group_->world_rank[static_cast<size_t>(transfer->peer)];
      if (transfer->state != Transfer::State::kPosted || !world.ended[static_cast<size_t>(peer)]) continue;
      why = describe(*transfer) + ": that rank returned without taking part";
      break;
    }
    if (why.empty() && Clock::now() >= deadline_) {
      why = describe(*pending) + ": not done within " + describe_seconds(timeout_.count());
    }
    if (why.empty()) return false;
    finished_ = true;
    kill_group(*group_, where(label_) + ": rank " + std::to_string(comm_.rank()) + " " + why);
    throw_comm(label_, why);
  }

  ThreadCommunicator& comm_;
  std::shared_ptr<Group> group_;
  std::vector<std::shared_ptr<Transfer>> transfers_;
  OpLabel label_;
  Clock::time_point deadline_;
  Seconds timeout_;
  int exceptions_;
  bool finished_ = false;
};

std::unique_ptr<Work> ThreadCommunicator::exchange(const std::vector<Message>& sends,
                                                   const std::vector<Message>& receives, OpLabel label) {
  check_messages(sends, receives, size_, at::kCPU, backend(), label);
  std::vector<std::shared_ptr<Transfer>> all;
  std::vector<std::pair<std::shared_ptr<Transfer>, std::shared_ptr<Transfer>>> to_copy;
  World& world = *group_->world;
  {
    std::unique_lock<std::mutex> lock(world.mutex);
    if (const auto why = hopeless(*group_)) throw PeerFailed(label, *why);
    const auto post = [&](const Message& message, bool is_send) {
      auto transfer = std::make_shared<Transfer>();
      transfer->tensor = message.tensor;
      transfer->self = rank_;
      transfer->peer = message.peer;
      transfer->is_send = is_send;
      transfer->bytes = message.tensor.nbytes();
      transfer->operation = std::string(label.operation);
      transfer->step = label.step;
      all.push_back(transfer);
      if (transfer->bytes > 0) {
        (is_send ? stats_.messages_sent : stats_.messages_received) += 1;
        (is_send ? stats_.bytes_sent : stats_.bytes_received) += static_cast<int64_t>(transfer->bytes);
      }
      const auto key = is_send ? std::pair(rank_, message.peer) : std::pair(message.peer, rank_);
      auto& others = is_send ? group_->receives[key] : group_->sends[key];
      if (others.empty()) {
        (is_send ? group_->sends[key] : group_->receives[key]).push_back(std::move(transfer));
        return;
      }
      const std::shared_ptr<Transfer> other = others.front();
      others.pop_front();
      const std::shared_ptr<Transfer>& send = is_send ? transfer : other;
      const std::shared_ptr<Transfer>& receive = is_send ? other : transfer;
      const at::ScalarType sent = send->tensor.scalar_type();
      const at::ScalarType expected = receive->tensor.scalar_type();
      if (send->bytes != receive->bytes || sent != expected) {
        const std::string what = "message from rank " + std::to_string(send->self) + " to rank " +
                                 std::to_string(receive->self) + ": sent " + std::to_string(send->bytes) +
                                 " bytes of " + dtype_name(sent) + " (" + send->operation + ", step " +
                                 std::to_string(send->step) + "), but the receiver expected " +
                                 std::to_string(receive->bytes) + " bytes of " + dtype_name(expected) + " (" +
                                 receive->operation + ", step " + std::to_string(receive->step) + ")";
        send->error = receive->error = what;
        send->state = receive->state = Transfer::State::kFailed;
        kill_group(*group_, what);
        return;
      }
      send->state = receive->state = Transfer::State::kCopying;
      to_copy.emplace_back(send, receive);
    };
    // Receives first: a message to oneself finds its buffer.
    for (const Message& message : receives) post(message, false);
    for (const Message& message : sends) post(message, true);
  }
  for (const auto& [send, receive] : to_copy) {
    if (send->bytes > 0) {
      std::memmove(receive->tensor.mutable_data_ptr(), send->tensor.const_data_ptr(), send->bytes);
    }
  }
  if (!to_copy.empty()) {
    std::lock_guard<std::mutex> lock(world.mutex);
    for (const auto& [send, receive] : to_copy) {
      send->state = receive->state = Transfer::State::kDone;
      for (const int r : {send->self, receive->self}) {
        world.wake[static_cast<size_t>(group_->world_rank[static_cast<size_t>(r)])].notify_all();
      }
    }
  }
  return std::make_unique<ThreadWork>(*this, std::move(all), label);
}

}  // namespace

void run_ranks(int n, const std::function<void(Communicator&)>& body) {
  if (n < 1) throw Error(ErrorKind::kPlan, "comm", "cannot run " + std::to_string(n) + " ranks: expected at least 1");
  const auto world = std::make_shared<World>(n);
  std::vector<int> ranks(static_cast<size_t>(n));
  for (int r = 0; r < n; ++r) ranks[static_cast<size_t>(r)] = r;
  const auto group = std::make_shared<Group>(world, std::move(ranks));
  const int threads_before = at::get_num_threads();
  const at::ThreadLocalState state;
  const auto record = [&](int rank, std::exception_ptr error, bool own) {
    const std::string text = what_of(error);
    std::lock_guard<std::mutex> lock(world->mutex);
    if (world->failed_rank >= 0 && (world->failure_is_own || !own)) return;
    world->failed_rank = rank;
    world->failure = std::move(error);
    world->failure_is_own = own;
    world->failure_text = text;
  };
  const auto run = [&](int rank) {
    const at::ThreadLocalStateGuard guard(state);
    try {
      at::set_num_threads(1);
      ThreadCommunicator comm(group, rank);
      body(comm);
    } catch (const PeerFailed&) {
      record(rank, std::current_exception(), false);
    } catch (...) {
      record(rank, std::current_exception(), true);
    }
    std::lock_guard<std::mutex> lock(world->mutex);
    world->ended[static_cast<size_t>(rank)] = true;
    world->wake_all();
  };
  std::vector<std::thread> threads;
  for (int r = 0; r < n; ++r) threads.emplace_back(run, r);
  for (std::thread& thread : threads) thread.join();
  at::set_num_threads(threads_before);
  if (world->failure) std::rethrow_exception(world->failure);
}

std::unique_ptr<Communicator> make_self_communicator() {
  return std::make_unique<ThreadCommunicator>(std::make_shared<Group>(std::make_shared<World>(1), std::vector<int>{0}),
                                              0);
}

}  // namespace annulus
