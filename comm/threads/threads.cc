// The threads backend. All ranks of a run share one mutex. The side of a transfer that comes second copies directly
// from the sender's tensor to the receiver's, outside the mutex. A thread sanitizer therefore reports a sender that
// changes its tensor during the transfer, which is an error with MPI as well. A collective is a meeting of all ranks,
// to which each brings its header and its input; a rank that has met may read the others' inputs until the next
// meeting. A collective that is begun is a meeting at which no rank waits: the last rank to come carries it out for
// all.
#include "comm/threads/threads.h"

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <functional>
#include <iterator>
#include <thread>
#include <utility>

#include "comm/checks.h"
#include "comm/communicator_backend.h"
#include "comm/deadline.h"
#include "comm/rank_order.h"
#include "comm/rounds.h"
#include "comm/threads/world.h"
#include "common/error.h"
#include "common/text.h"
#include "memory/pool/pool_tensor.h"

namespace annulus {
namespace {

using namespace comm_internal;
using namespace threads_internal;

std::string missed(const std::string& what, Seconds timeout, World::Woken woken, const World& world) {
  return missed_deadline(what, timeout) +
         (woken == World::Woken::kStuck ? " (given up at once: every rank waits: " + world.waits() + ")" : "");
}

class ThreadCommunicator final : public CommunicatorBackend {
 public:
  // host: a communicator of the same ranks on the CPU, unless `device` is the CPU.
  ThreadCommunicator(std::shared_ptr<Group> group, int rank, at::Device device = at::kCPU,
                     std::shared_ptr<Communicator> host = nullptr)
      : CommunicatorBackend(rank, group->size(), device), group_(std::move(group)), host_(std::move(host)) {}

  std::string_view backend() const override { return "threads"; }
  int in_job(int rank) const override { return group_->in_world(rank); }
  Communicator& host() override {
    if (!host_) return *this;
    host_->set_timeout(timeout_);
    return *host_;
  }

  void progress() override {
    if (!group_->world->ordered()) return;
    std::unique_lock<std::mutex> lock(group_->world->mutex);
    group_->world->look_in_vain(lock, group_->in_world(rank_));
  }

  at::Tensor lendable(at::IntArrayRef sizes, const at::TensorOptions& options) override {
    return make_lendable(sizes, options);
  }

 protected:
  bool can_lend_to(int) const override { return true; }
  bool is_lendable(const at::Tensor& tensor) const override { return threads_internal::is_lendable(tensor); }

  void before_operation(OpLabel label) override {
    std::unique_lock<std::mutex> lock(group_->world->mutex);
    come_to(lock, label);
    if (const std::string why = group_->failure(); !why.empty()) fail(ErrorKind::kComm, why, /*raised=*/true);
  }

  std::vector<CollectiveHeader> gather_headers(const CollectiveHeader& mine, const at::Tensor& brings,
                                               OpLabel label) override {
    agreed_ = arrive({mine, brings}, label);
    return agreed_->headers();
  }

  std::unique_ptr<StartedOperation> start_exchange(const std::vector<Message>& sends,
                                                   const std::vector<Message>& receives, OpLabel label) override;

  // Each rank reduces one slice, in rank order; then every rank copies all slices.
  std::unique_ptr<StartedOperation> start_all_reduce(at::Tensor& tensor, ReduceOp op, OpLabel label) override {
    require_cpu(label);
    auto inputs = std::exchange(agreed_, nullptr);
    const int64_t n = tensor.numel();
    const int64_t begin = n * rank_ / size_;
    const int64_t end = n * (rank_ + 1) / size_;
    const int64_t width = tensor.element_size();
    at::Tensor part = pool_tensor({end - begin}, tensor.options(), PoolPurpose::kGradients);
    std::vector<const void*> slices;
    for (int r = 0; r < size_; ++r) {
      slices.push_back(static_cast<const char*>(inputs->tensor(r).const_data_ptr()) + begin * width);
    }
    reduce_in_rank_order(tensor.scalar_type(), op, part.mutable_data_ptr(), slices, part.numel(), RankGroups({size_}));
    inputs.reset();
    const auto parts = arrive({{}, part}, label);
    char* out = static_cast<char*>(tensor.mutable_data_ptr());
    for (int r = 0; r < size_; ++r) {
      const at::Tensor& slice = parts->tensor(r);
      if (slice.numel() == 0) continue;
      std::memcpy(out + n * r / size_ * width, slice.const_data_ptr(), slice.nbytes());
    }
    return nullptr;
  }

  std::unique_ptr<StartedOperation> start_broadcast(at::Tensor& tensor, int root, OpLabel label) override {
    require_cpu(label);
    auto inputs = std::exchange(agreed_, nullptr);
    if (rank_ != root) {
      std::memcpy(tensor.mutable_data_ptr(), inputs->tensor(root).const_data_ptr(), tensor.nbytes());
    }
    // No input may change before all ranks have read it. And no other rank may keep a reference to it: after the call,
    // freeing the tensor must free its memory.
    inputs.reset();
    arrive({}, label);
    return nullptr;
  }

  std::unique_ptr<StartedOperation> begin(const Begun& call) override;

  std::unique_ptr<Communicator> make_split(int color, int key, OpLabel label) override {
    require_cpu(label);
    const auto meeting = arrive({{}, {}, {}, color, key}, label);
    if (color < 0) return nullptr;
    std::vector<std::pair<int, int>> members;  // (key, rank)
    for (int r = 0; r < size_; ++r) {
      const Meeting::Item& other = meeting->items[static_cast<size_t>(r)];
      if (other.color == color) members.emplace_back(other.key, r);
    }
    std::sort(members.begin(), members.end());
    int rank = 0;
    while (members[static_cast<size_t>(rank)].second != rank_) ++rank;
    std::lock_guard<std::mutex> lock(group_->world->mutex);
    std::shared_ptr<Group>& group = meeting->groups[color];
    if (!group) {
      std::vector<int> ranks;
      for (const auto& [k, r] : members) ranks.push_back(group_->in_world(r));
      group = std::make_shared<Group>(group_->world, std::move(ranks));
    }
    return std::make_unique<ThreadCommunicator>(group, rank);
  }

 private:
  class Operation;
  class Exchange;
  class BegunOperation;

  void come_to(std::unique_lock<std::mutex>& lock, OpLabel label) {
    group_->world->come_to(lock, group_->in_world(rank_), label);
  }

  void require_cpu(OpLabel label) const {
    if (device_.is_cpu()) return;
    throw Error(ErrorKind::kPlan, "comm",
                where(label) + ": ranks that share a device only exchange its tensors; use host() and the CPU");
  }

  // Brings item to the group's next meeting. The caller holds the mutex, for this function and for check_missing().
  std::shared_ptr<Meeting> come(Meeting::Item item) {
    const int64_t number = meetings_++;
    std::shared_ptr<Meeting>& slot = group_->meetings[number];
    if (!slot) slot = std::make_shared<Meeting>(size_);
    std::shared_ptr<Meeting> meeting = slot;
    meeting->items[static_cast<size_t>(rank_)] = std::move(item);
    meeting->here[static_cast<size_t>(rank_)] = true;
    if (++meeting->arrived == size_) {
      group_->meetings.erase(number);
      for (int r = 0; r < size_; ++r) group_->wake(r);
    }
    return meeting;
  }

  // Raises if the ranks that have not come to a meeting never will, or did not come in time.
  void check_missing(const Meeting& meeting, World::Woken woken, Seconds timeout, OpLabel label) {
    if (const std::string why = group_->failure(); !why.empty()) throw DeadCommunicator(label, why);
    const std::vector<int> missing = meeting.missing();
    std::vector<int> gone;
    std::copy_if(missing.begin(), missing.end(), std::back_inserter(gone), [&](int r) { return group_->ended(r); });
    if (gone.empty() && woken == World::Woken::kByPeer) return;
    const std::string why =
        gone.empty() ? missed(describe_ranks(*this, missing) + " did not come", timeout, woken, *group_->world)
                     : describe_ranks(*this, gone) + " returned without taking part";
    group_->kill(where(label) + ": " + why);
    throw_comm(label, why);
  }

  std::string describe_missing(const Meeting& meeting, OpLabel label) const {
    return where(label) + ": waiting for " + describe_ranks(*this, meeting.missing());
  }

  // Brings item to the group's next meeting and waits until all ranks have come.
  std::shared_ptr<Meeting> arrive(Meeting::Item item, OpLabel label) {
    const Waiting waiting(*this, blocked_by());
    const Deadline deadline(timeout_);
    World& world = *group_->world;
    std::unique_lock<std::mutex> lock(world.mutex);
    const std::shared_ptr<Meeting> meeting = come(std::move(item));
    const std::function<std::string()> describe = [&] { return describe_missing(*meeting, label); };
    for (auto woken = World::Woken::kByPeer; meeting->arrived < size_;
         woken = world.block(lock, group_->in_world(rank_), deadline.time, describe)) {
      check_missing(*meeting, woken, timeout_, label);
    }
    return meeting;
  }

  std::shared_ptr<Group> group_;
  std::shared_ptr<Meeting> agreed_;  // the agreement of the collective that is being carried out
  const std::shared_ptr<Communicator> host_;
  int64_t meetings_ = 0;  // the number of this group's meetings that this rank has come to
};

// What was started: messages, or a collective that was begun.
class ThreadCommunicator::Operation : public StartedOperation {
 public:
  bool test() final {
    {
      std::unique_lock<std::mutex> lock(group_->world->mutex);
      comm_.come_to(lock, label_);
      if (poll(World::Woken::kByPeer)) return true;
      group_->world->look_in_vain(lock, group_->in_world(comm_.rank()));
    }
    return deadline_.passed() && wait();
  }

  bool wait() final {
    const Waiting waiting(comm_, what_);
    World& world = *group_->world;
    std::unique_lock<std::mutex> lock(world.mutex);
    comm_.come_to(lock, label_);
    const std::function<std::string()> describe = [this] { return describe_wait(); };
    for (auto woken = World::Woken::kByPeer; !poll(woken);) {
      if (woken == World::Woken::kStuck) {
        // What all wait for is being carried out by another thread of a rank that has ended, which needs the mutex.
        lock.unlock();
        std::this_thread::yield();
        lock.lock();
      }
      woken = world.block(lock, group_->in_world(comm_.rank()), deadline_.time, describe);
    }
    return true;
  }

  void abandon() final {
    const std::lock_guard<std::mutex> lock(group_->world->mutex);
    if (!complete()) group_->kill(where(label_) + ": abandoned by " + describe_ranks(comm_, {comm_.rank()}));
  }

 protected:
  Operation(ThreadCommunicator& comm, OpLabel label, WaitFor what)
      : comm_(comm), group_(comm.group_), label_(label), what_(what), deadline_(comm.timeout()) {}

  // Returns true when the operation is complete, and raises if it never will be. `woken` is why a blocked rank
  // continues. The caller holds the mutex.
  virtual bool poll(World::Woken woken) = 0;
  virtual bool complete() const = 0;
  // "ring, hop 3: receiving 16 bytes from rank 1". The caller holds the mutex.
  virtual std::string describe_wait() const = 0;

  ThreadCommunicator& comm_;
  std::shared_ptr<Group> group_;
  OpLabel label_;
  WaitFor what_;
  Deadline deadline_;
};

class ThreadCommunicator::Exchange final : public Operation {
 public:
  Exchange(ThreadCommunicator& comm, std::vector<std::shared_ptr<Transfer>> transfers, OpLabel label)
      : Operation(comm, label, WaitFor::kExchange), transfers_(std::move(transfers)) {}

 private:
  bool complete() const override {
    return std::all_of(transfers_.begin(), transfers_.end(),
                       [](const auto& t) { return t->state == Transfer::State::kDone; });
  }

  std::string describe_wait() const override {
    std::string text;
    for (const auto& transfer : transfers_) {
      if (transfer->state != Transfer::State::kPosted) continue;
      text += (text.empty() ? where(label_) + ": " : ", ") + transfer->describe(comm_);
    }
    return text;
  }

  bool poll(World::Woken woken) override {
    const Transfer* pending = nullptr;
    for (const auto& transfer : transfers_) {
      if (transfer->state == Transfer::State::kFailed) throw_mismatch(label_, transfer->error);
      if (transfer->state == Transfer::State::kPosted && pending == nullptr) pending = transfer.get();
    }
    if (complete()) return true;
    if (pending == nullptr) return false;  // a peer is copying and will be done soon
    if (const std::string why = group_->failure(); !why.empty()) {
      throw DeadCommunicator(label_, pending->describe(comm_) + ": " + why);
    }
    std::string why;
    for (const auto& transfer : transfers_) {
      if (transfer->state != Transfer::State::kPosted || !group_->ended(transfer->peer)) continue;
      why = transfer->describe(comm_) + ": that rank returned without taking part";
      break;
    }
    if (why.empty() && woken != World::Woken::kByPeer) {
      why = missed(pending->describe(comm_) + ": not done", deadline_.timeout, woken, *group_->world);
    }
    if (why.empty()) return false;
    group_->kill(where(label_) + ": " + describe_ranks(comm_, {comm_.rank()}) + " " + why);
    throw_comm(label_, why);
  }

  std::vector<std::shared_ptr<Transfer>> transfers_;
};

// A meeting at which no rank waits. The last rank to come carries out the collective.
class ThreadCommunicator::BegunOperation final : public Operation {
 public:
  BegunOperation(ThreadCommunicator& comm, std::shared_ptr<Meeting> meeting, const Begun& call)
      : Operation(comm, call.label, wait_for(call)), meeting_(std::move(meeting)) {}

 private:
  bool complete() const override { return meeting_->carried_out; }
  std::string describe_wait() const override { return comm_.describe_missing(*meeting_, label_); }

  bool poll(World::Woken woken) override {
    if (complete()) return true;
    if (meeting_->arrived == comm_.size()) {
      require_same_headers(comm_, meeting_->headers(), label_);
    } else {
      comm_.check_missing(*meeting_, woken, deadline_.timeout, label_);
    }
    return false;  // also while the last rank carries it out, which will be done soon
  }

  std::shared_ptr<Meeting> meeting_;
};

std::unique_ptr<StartedOperation> ThreadCommunicator::begin(const Begun& call) {
  require_cpu(call.label);
  *call.to_other_hosts = bytes_to_other_hosts(rank_, hosts_, call);
  std::unique_lock<std::mutex> lock(group_->world->mutex);
  const std::shared_ptr<Meeting> meeting = come({call.header, call.in, call.out});
  auto operation = std::make_unique<BegunOperation>(*this, meeting, call);
  if (meeting->arrived < size_ || !describe_disagreement(*this, meeting->headers(), call.label.counted).empty()) {
    return operation;
  }
  lock.unlock();
  carry_out(*meeting, call, hosts_.groups());
  lock.lock();
  // Drop the references to the tensors of the other ranks.
  for (Meeting::Item& item : meeting->items) item.tensor = item.out = at::Tensor();
  meeting->carried_out = true;
  for (int r = 0; r < size_; ++r) group_->wake(r);
  return operation;
}

std::unique_ptr<StartedOperation> ThreadCommunicator::start_exchange(const std::vector<Message>& sends,
                                                                     const std::vector<Message>& receives,
                                                                     OpLabel label) {
  std::vector<std::shared_ptr<Transfer>> all;
  std::vector<std::pair<std::shared_ptr<Transfer>, std::shared_ptr<Transfer>>> to_copy;
  World& world = *group_->world;
  {
    std::unique_lock<std::mutex> lock(world.mutex);
    const auto post = [&](const Message& message, bool is_send) {
      auto transfer = std::make_shared<Transfer>();
      transfer->tensor = message.tensor;
      transfer->self = rank_;
      transfer->peer = message.peer;
      transfer->is_send = is_send;
      transfer->bytes = message.tensor.nbytes();
      transfer->where = where(label);
      all.push_back(transfer);
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
        const std::string what = "message from " + describe_ranks(*this, {send->self}) + " to " +
                                 describe_ranks(*this, {receive->self}) + ": sent " + counted(send->bytes, "byte") +
                                 " of " + dtype_name(sent) + " (" + send->where + "), but the receiver expected " +
                                 counted(receive->bytes, "byte") + " of " + dtype_name(expected) + " (" +
                                 receive->where + ")";
        send->error = receive->error = what;
        send->state = receive->state = Transfer::State::kFailed;
        group_->kill(what);
        return;
      }
      send->state = receive->state = Transfer::State::kCopying;
      to_copy.emplace_back(send, receive);
    };
    // Receives come first, so that a message from this rank to itself finds its buffer.
    for (const Message& message : receives) post(message, false);
    for (const Message& message : sends) post(message, true);
  }
  for (const auto& [send, receive] : to_copy) pass_on(*send, *receive);
  if (!to_copy.empty()) {
    std::lock_guard<std::mutex> lock(world.mutex);
    for (auto& [send, receive] : to_copy) {
      send->state = receive->state = Transfer::State::kDone;
      group_->wake(send->self);
      group_->wake(receive->self);
      // The peer may continue as soon as the mutex is free; no other rank may hold its tensor then.
      send.reset();
      receive.reset();
    }
  }
  return std::make_unique<Exchange>(*this, std::move(all), label);
}

}  // namespace

void run_ranks(int n, const std::function<void(Communicator&)>& body, at::Device device, RankOrder* order) {
  if (n < 1) throw Error(ErrorKind::kPlan, "comm", "cannot run " + std::to_string(n) + " ranks: expected at least 1");
  const auto world = std::make_shared<World>(n, order);
  std::vector<int> ranks(static_cast<size_t>(n));
  for (int r = 0; r < n; ++r) ranks[static_cast<size_t>(r)] = r;
  const auto group = std::make_shared<Group>(world, ranks);
  const auto host_group = device.is_cpu() ? nullptr : std::make_shared<Group>(world, ranks);
  const int threads_before = at::get_num_threads();
  const at::ThreadLocalState state;
  const auto record = [&](int rank, bool own) {
    std::lock_guard<std::mutex> lock(world->mutex);
    world->record_failure(rank, std::current_exception(), own);
  };
  const auto run = [&](int rank) {
    const at::ThreadLocalStateGuard guard(state);
    world->begin(rank);
    try {
      at::set_num_threads(1);
      const auto host = host_group ? std::make_shared<ThreadCommunicator>(host_group, rank) : nullptr;
      const auto comm = std::make_shared<ThreadCommunicator>(group, rank, device, host);
      body(*comm);
    } catch (const DeadCommunicator&) {
      record(rank, /*own=*/false);
    } catch (...) {
      record(rank, /*own=*/true);
    }
    std::lock_guard<std::mutex> lock(world->mutex);
    world->end(rank);
  };
  std::vector<std::thread> threads;
  for (int r = 0; r < n; ++r) threads.emplace_back(run, r);
  for (std::thread& thread : threads) thread.join();
  at::set_num_threads(threads_before);
  if (world->failure()) std::rethrow_exception(world->failure());
}

std::shared_ptr<Communicator> make_self_communicator() {
  return std::make_shared<ThreadCommunicator>(std::make_shared<Group>(std::make_shared<World>(1), std::vector<int>{0}),
                                              0);
}

}  // namespace annulus
