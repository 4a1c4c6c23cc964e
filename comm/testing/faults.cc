// See faults.h.
#include "comm/testing/faults.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <signal.h>

#include <algorithm>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "comm/checks.h"

namespace annulus::testing {
namespace {

// A Work that nobody waits for any more. Its destructor would wait for a message that may never be received.
void leave(std::unique_ptr<Work> work) {
  try {
    if (work->test()) return;
  } catch (const Error&) {
    return;  // it has failed, so its destructor waits for nothing
  }
  static std::mutex mutex;
  static auto* const left = new std::vector<std::unique_ptr<Work>>();  // never destroyed
  const std::lock_guard<std::mutex> lock(mutex);
  left->push_back(std::move(work));
}

std::vector<Message> copies(const std::vector<Message>& messages) {
  std::vector<Message> out;
  for (const Message& message : messages) out.push_back({message.tensor.clone(), message.peer});
  return out;
}

class FaultyCommunicator final : public Communicator {
 public:
  FaultyCommunicator(Communicator& comm, std::shared_ptr<FaultCounter> counter)
      : comm_(comm), counter_(std::move(counter)) {}
  FaultyCommunicator(std::unique_ptr<Communicator> comm, std::shared_ptr<FaultCounter> counter)
      : owned_(std::move(comm)), comm_(*owned_), counter_(std::move(counter)) {}
  ~FaultyCommunicator() override {
    for (std::unique_ptr<Work>& work : extra_) leave(std::move(work));
  }

  int rank() const override { return comm_.rank(); }
  int size() const override { return comm_.size(); }
  std::string_view backend() const override { return comm_.backend(); }
  int in_job(int rank) const override { return comm_.in_job(rank); }
  Communicator& host() override { return &comm_.host() == &comm_ ? *this : comm_.host(); }
  const RankHosts& hosts() const override { return comm_.hosts(); }
  void set_hosts(const std::vector<int>& of) override { comm_.set_hosts(of); }
  Seconds timeout() const override { return comm_.timeout(); }
  void set_timeout(Seconds timeout) override { comm_.set_timeout(timeout); }
  bool lends_to(int peer) const override { return comm_.lends_to(peer); }
  at::Tensor lendable(at::IntArrayRef sizes, const at::TensorOptions& options) override {
    return comm_.lendable(sizes, options);
  }
  void set_lending(bool lending) override { comm_.set_lending(lending); }

  std::unique_ptr<Work> exchange(const std::vector<Message>& sends, const std::vector<Message>& receives,
                                 OpLabel label) override {
    const FaultCounter::Now now = meet_fault(label, !sends.empty());
    const bool holds = now.drop || now.reorder;
    const std::vector<Message> again =
        now.duplicate || (now.reorder && !now.drop) ? copies(sends) : std::vector<Message>();
    std::unique_ptr<Work> work = comm_.exchange(holds ? std::vector<Message>() : sends, receives, label);
    if (now.duplicate && !holds) extra_.push_back(comm_.exchange(again, {}, label));
    if (const std::vector<Message> overtaken = holds ? std::vector<Message>() : take_late(sends); !overtaken.empty()) {
      extra_.push_back(comm_.exchange(overtaken, {}, label));
    }
    if (now.reorder && !now.drop) late_.insert(late_.end(), again.begin(), again.end());
    return work;
  }
  void all_reduce(at::Tensor& tensor, ReduceOp op, OpLabel label) override {
    meet_fault(label);
    comm_.all_reduce(tensor, op, label);
  }
  void all_gather(at::Tensor& out, const at::Tensor& in, OpLabel label) override {
    meet_fault(label);
    comm_.all_gather(out, in, label);
  }
  void reduce_scatter(at::Tensor& out, const at::Tensor& in, OpLabel label) override {
    meet_fault(label);
    comm_.reduce_scatter(out, in, label);
  }
  void broadcast(at::Tensor& tensor, int root, OpLabel label) override {
    meet_fault(label);
    comm_.broadcast(tensor, root, label);
  }
  void barrier(OpLabel label) override {
    meet_fault(label);
    comm_.barrier(label);
  }
  std::unique_ptr<Work> begin_all_reduce(const at::Tensor& tensor, ReduceOp op, OpLabel label) override {
    meet_fault(label);
    return comm_.begin_all_reduce(tensor, op, label);
  }
  std::unique_ptr<Work> begin_all_gather(const at::Tensor& out, const at::Tensor& in, OpLabel label) override {
    meet_fault(label);
    return comm_.begin_all_gather(out, in, label);
  }
  std::unique_ptr<Work> begin_reduce_scatter(const at::Tensor& out, const at::Tensor& in, OpLabel label) override {
    meet_fault(label);
    return comm_.begin_reduce_scatter(out, in, label);
  }
  int64_t reduce_scatter_holds(int64_t payload) const override { return comm_.reduce_scatter_holds(payload); }
  std::unique_ptr<Communicator> split(int color, int key, const SplitOptions& options) override {
    meet_fault({"split", 0});
    std::unique_ptr<Communicator> part = comm_.split(color, key, options);
    return part ? std::make_unique<FaultyCommunicator>(std::move(part), counter_) : nullptr;
  }
  int64_t number_call() override { return comm_.number_call(); }
  void progress() override { comm_.progress(); }
  const CommStats& stats() const override { return comm_.stats(); }

 private:
  FaultCounter::Now meet_fault(OpLabel label, bool sends = false) {
    const FaultCounter::Now now = counter_->next(sends);
    if (now.delay > 0) std::this_thread::sleep_for(Seconds(now.delay));
    if (now.kill) kill_rank(label);
    if (now.stop) stop_rank(label);
    return now;
  }

  // Takes out the messages that were held back until these were sent.
  std::vector<Message> take_late(const std::vector<Message>& sends) {
    const auto waits = [&](const Message& late) {
      return std::none_of(sends.begin(), sends.end(), [&](const Message& now) { return now.peer == late.peer; });
    };
    const auto first = std::stable_partition(late_.begin(), late_.end(), waits);
    std::vector<Message> out(first, late_.end());
    late_.erase(first, late_.end());
    return out;
  }

  void kill_rank(OpLabel label) {
    if (backend() != "threads") raise(SIGKILL);
    throw KilledByPlan("rank " + std::to_string(in_job(rank())) + " was killed by the plan of faults before " +
                       comm_internal::where(label));
  }

  void stop_rank(OpLabel label) {
    if (backend() != "threads") {
      raise(SIGSTOP);
      return;
    }
    // Nobody sends this message. The deadlines of the others are earlier.
    const Seconds before = timeout();
    set_timeout(Seconds(365.0 * 86400));
    at::Tensor nothing = at::zeros({1});
    const std::unique_ptr<Work> work = comm_.exchange({}, {{nothing, rank()}}, label);
    set_timeout(before);
    work->wait();
  }

  std::unique_ptr<Communicator> owned_;
  Communicator& comm_;
  std::shared_ptr<FaultCounter> counter_;
  std::vector<Message> late_;                 // that are sent after the next ones to the same ranks
  std::vector<std::unique_ptr<Work>> extra_;  // messages of which the caller knows nothing
};

}  // namespace

std::shared_ptr<Communicator> with_faults(Communicator& comm, const FaultPlan& plan) {
  return std::make_shared<FaultyCommunicator>(comm, std::make_shared<FaultCounter>(plan, comm.in_job(comm.rank())));
}

}  // namespace annulus::testing
