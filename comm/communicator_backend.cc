// See communicator_backend.h.
#include "comm/communicator_backend.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <utility>

#include "comm/checks.h"
#include "common/logging/log.h"
#include "common/splitmix64.h"
#include "common/trace/recorder.h"
#include "memory/pool/pool_tensor.h"
#include "memory/releasable.h"

namespace annulus {

using namespace comm_internal;

namespace {

// Adds the messages that have elements.
void add_up(const std::vector<Message>& messages, int64_t& number, int64_t& bytes) {
  for (const Message& message : messages) {
    const auto size = static_cast<int64_t>(message.tensor.nbytes());
    number += size > 0 ? 1 : 0;
    bytes += size;
  }
}

}  // namespace

TraceName trace_name(Collective collective) {
  return TraceName::of_literal(collective_name(static_cast<int8_t>(collective)));
}

int64_t payload_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

// One call of a collective: the values of its header.
struct CommunicatorBackend::Call {
  Collective collective;
  OpLabel label;
  const at::Tensor* brings = nullptr;  // the tensor whose shape and dtype all ranks must share
  int op = -1;                         // ReduceOp
  int root = -1;
};

// The Work of every operation of every backend.
class CommunicatorBackend::StartedWork final : public Work {
 public:
  // operation: null if it is complete. traced: its number in traces. count: called once, when the operation is found to
  // be complete.
  StartedWork(CommunicatorBackend& comm, std::unique_ptr<StartedOperation> operation, uint64_t traced, OpLabel label,
              std::function<void()> count = nullptr)
      : comm_(comm),
        operation_(std::move(operation)),
        traced_(traced),
        label_(label),
        count_(std::move(count)),
        exceptions_(std::uncaught_exceptions()) {}

  ~StartedWork() override {
    if (waited_ || !operation_) return;
    if (std::uncaught_exceptions() > exceptions_) {
      operation_->abandon();
      return;
    }
    try {
      operation_->wait();
      trace_end(traced_);
    } catch (const std::exception& e) {
      log_error(e, comm_.in_job(comm_.rank()));
    }
  }

  bool test() override {
    advance(&StartedOperation::test);
    return over_;
  }

  void wait() override {
    if (std::exchange(waited_, true) && !raised_) return;
    if (over_) return advance(&StartedOperation::wait);
    const TraceSpan span(TraceKind::kWait, "wait", label_.operation);
    advance(&StartedOperation::wait);
  }

 private:
  void advance(bool (StartedOperation::*by)()) {
    if (raised_) std::rethrow_exception(raised_);
    if (std::exchange(over_, true)) return;  // it stays over if this raises, and is then not counted
    std::unique_ptr<StartedOperation> operation = std::move(operation_);
    try {
      if (operation && !(operation.get()->*by)()) {
        operation_ = std::move(operation);
        over_ = false;
      }
    } catch (...) {
      raised_ = std::current_exception();  // every later test() and wait() raises it again
      throw;
    }
    if (!over_ && !waited_) return;
    trace_end(std::exchange(traced_, 0));
    if (const std::function<void()> count = std::exchange(count_, nullptr)) count();
  }

  CommunicatorBackend& comm_;
  std::unique_ptr<StartedOperation> operation_;
  uint64_t traced_;
  const OpLabel label_;
  std::function<void()> count_;
  int exceptions_;
  bool waited_ = false, over_ = false;
  std::exception_ptr raised_;
};

void CommunicatorBackend::check(const at::Tensor& tensor, const char* role, OpLabel label) const {
  check_tensor(tensor, device_, backend(), role, label);
}

// Records the messages of an exchange that have elements. Returns its number in traces.
uint64_t CommunicatorBackend::trace_exchange(const std::vector<Message>& sends, const std::vector<Message>& receives,
                                             OpLabel label) {
  const uint64_t number = trace_begin(TraceKind::kExchange, "exchange", label.operation, -1);
  const auto add = [&](const std::vector<Message>& messages, bool sent) {
    for (const Message& message : messages) {
      if (message.tensor.nbytes() == 0) continue;
      const auto peer = static_cast<size_t>(message.peer);
      const uint64_t nth = sent ? sent_to_[peer]++ : received_from_[peer]++;
      const int from = sent ? rank_ : message.peer, to = sent ? message.peer : rank_;
      const auto ends = static_cast<uint64_t>(from) << 32 | static_cast<uint64_t>(to);
      trace_message(sent ? TraceKind::kSend : TraceKind::kReceive, in_job(message.peer), payload_of(message.tensor),
                    number, splitmix64(splitmix64(traced_as_ ^ ends) ^ nth) | 1);
    }
  };
  add(sends, true);
  add(receives, false);
  return number;
}

std::unique_ptr<Work> CommunicatorBackend::exchange(const std::vector<Message>& sends,
                                                    const std::vector<Message>& receives, OpLabel label) {
  check_messages(sends, receives, size_, device_, backend(), label);
  before_operation(label);
  check_alive(label);
  for (const Message& message : receives) {
    if (!has_memory(message.tensor) && !lends_to(message.peer)) give_own_memory(message.tensor);
  }
  const uint64_t traced = trace_exchange(sends, receives, label);
  std::unique_ptr<StartedOperation> operation = start_exchange(sends, receives, label);
  add_up(sends, stats_.messages_sent, stats_.bytes_sent);
  add_up(receives, stats_.messages_received, stats_.bytes_received);
  for (const Message& message : sends) {
    const auto bytes = static_cast<int64_t>(message.tensor.nbytes());
    if (hosts_.of(message.peer) != hosts_.of(rank_)) stats_.bytes_to_other_hosts += bytes;
    if (lends_to(message.peer) && is_lendable(message.tensor)) stats_.bytes_lent += bytes;
  }
  return std::make_unique<StartedWork>(*this, std::move(operation), traced, label);
}

bool CommunicatorBackend::lends_to(int peer) const {
  return lending_ && hosts_.of(peer) == hosts_.of(rank_) && can_lend_to(peer);
}

at::Tensor CommunicatorBackend::lendable(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return pool_tensor(sizes, options, PoolPurpose::kTravelling);
}

// The ranks exchange what they are about to do. If they differ, the same Error(kMismatch) is raised on all of them.
void CommunicatorBackend::agree(const Call& call) {
  before_operation(call.label);
  check_alive(call.label);
  blocked_by_ = call.collective == Collective::kAllReduce   ? WaitFor::kReduce
                : call.collective == Collective::kBroadcast ? WaitFor::kGather
                                                            : WaitFor::kOther;
  const CollectiveHeader mine = make_header(call.collective, calls_++, call.brings, call.op, call.root, call.label);
  const std::vector<CollectiveHeader> all =
      gather_headers(mine, call.brings == nullptr ? at::Tensor() : *call.brings, call.label);
  require_same_headers(*this, all, call.label);
}

std::vector<CollectiveHeader> CommunicatorBackend::gather_headers(const CollectiveHeader& mine, const at::Tensor&,
                                                                  OpLabel label) {
  Communicator& channel = host();
  if (&channel == this) {
    throw Error(ErrorKind::kInternal, "comm",
                where(label) + ": backend " + std::string(backend()) + " has no way to gather headers");
  }
  constexpr auto kBytes = static_cast<int64_t>(sizeof mine);
  at::Tensor one = at::empty({kBytes}, at::kByte);
  std::memcpy(one.mutable_data_ptr(), &mine, sizeof mine);
  at::Tensor all = at::empty({size_, kBytes}, at::kByte);
  // The label is the same on all ranks, so that this all_gather succeeds and the headers are then compared all at once.
  channel.all_gather(all, one, {"agreement before a collective", 0});
  std::vector<CollectiveHeader> headers(static_cast<size_t>(size_));
  std::memcpy(headers.data(), all.const_data_ptr(), all.nbytes());
  return headers;
}

// sends: how many times a rank sends (N-1)/N of the payload with an algorithm that sends the fewest bytes.
void CommunicatorBackend::count(size_t payload, int sends) {
  const auto bytes = static_cast<int64_t>(payload);
  ++stats_.collectives;
  stats_.collective_payload += bytes;
  stats_.collective_bytes_sent += sends * (bytes - bytes / size_);
}

void CommunicatorBackend::finish(std::unique_ptr<StartedOperation> operation, size_t payload, int sends) {
  if (operation) operation->wait();
  count(payload, sends);
}

void CommunicatorBackend::add_wait(WaitFor what, Seconds time) {
  stats_.wait_seconds += time.count();
  if (what == WaitFor::kExchange) stats_.exchange_wait_seconds += time.count();
  if (what == WaitFor::kReduce) stats_.reduce_wait_seconds += time.count();
  if (what == WaitFor::kGather) stats_.gather_wait_seconds += time.count();
}

void CommunicatorBackend::all_reduce(at::Tensor& tensor, ReduceOp op, OpLabel label) {
  if (hosts_.count() > 1 && adds_in_rank_order()) return begin_all_reduce(tensor, op, label)->wait();
  check(tensor, "tensor", label);
  check_reducible(tensor, backend(), /*bf16=*/false, label);
  const TraceSpan span(TraceKind::kCollective, trace_name(Collective::kAllReduce), label.operation, payload_of(tensor));
  agree({Collective::kAllReduce, label, &tensor, static_cast<int>(op), -1});
  finish(tensor.nbytes() > 0 ? start_all_reduce(tensor, op, label) : nullptr, tensor.nbytes(), 2);
}

void CommunicatorBackend::all_gather(at::Tensor& out, const at::Tensor& in, OpLabel label) {
  begin_all_gather(out, in, label)->wait();
}

void CommunicatorBackend::reduce_scatter(at::Tensor& out, const at::Tensor& in, OpLabel label) {
  begin_reduce_scatter(out, in, label)->wait();
}

std::unique_ptr<Work> CommunicatorBackend::begin_all_gather(const at::Tensor& out, const at::Tensor& in,
                                                            OpLabel label) {
  check(in, "input", label);
  check(out, "output", label);
  check_gather_shapes(out, "output", in, "input", size_, label);
  check_overlap(out, "output", in, "input", rank_, label);
  return begin_call(Collective::kAllGather, ReduceOp::kSum, out, in, label);
}

std::unique_ptr<Work> CommunicatorBackend::begin_reduce_scatter(const at::Tensor& out, const at::Tensor& in,
                                                                OpLabel label) {
  check(in, "input", label);
  check(out, "output", label);
  check_reducible(in, backend(), /*bf16=*/true, label);
  check_gather_shapes(in, "input", out, "output", size_, label);
  check_overlap(in, "input", out, "output", rank_, label);
  return begin_call(Collective::kReduceScatter, ReduceOp::kSum, out, in, label);
}

std::unique_ptr<Work> CommunicatorBackend::begin_all_reduce(const at::Tensor& tensor, ReduceOp op, OpLabel label) {
  check(tensor, "tensor", label);
  check_reducible(tensor, backend(), /*bf16=*/false, label);
  return begin_call(Collective::kAllReduce, op, tensor, tensor, label);
}

std::unique_ptr<Work> CommunicatorBackend::begin_call(Collective which, ReduceOp op, const at::Tensor& out,
                                                      const at::Tensor& in, OpLabel label) {
  before_operation(label);
  check_alive(label);
  const int shown = which == Collective::kAllGather ? -1 : static_cast<int>(op);
  const Begun call{make_header(which, calls_++, &in, shown, -1, label), out, in, label, std::make_shared<int64_t>(0)};
  const size_t payload = std::max(out.nbytes(), in.nbytes());
  const int sends = which == Collective::kAllReduce ? 2 : 1;
  const uint64_t traced =
      trace_begin(TraceKind::kBegun, trace_name(which), label.operation, static_cast<int64_t>(payload));
  return std::make_unique<StartedWork>(*this, begin(call), traced, label,
                                       [this, payload, sends, bytes = call.to_other_hosts] {
                                         count(payload, sends);
                                         stats_.collective_bytes_to_other_hosts += *bytes;
                                       });
}

void CommunicatorBackend::broadcast(at::Tensor& tensor, int root, OpLabel label) {
  check(tensor, "tensor", label);
  check_root(root, size_, label);
  const TraceSpan span(TraceKind::kCollective, trace_name(Collective::kBroadcast), label.operation, payload_of(tensor));
  agree({Collective::kBroadcast, label, &tensor, -1, root});
  finish(tensor.nbytes() > 0 ? start_broadcast(tensor, root, label) : nullptr, tensor.nbytes(), 1);
}

// The agreement is enough: no rank has all headers before every rank has called.
void CommunicatorBackend::barrier(OpLabel label) {
  const TraceSpan span(TraceKind::kCollective, trace_name(Collective::kBarrier), label.operation);
  agree({Collective::kBarrier, label});
  finish(nullptr, 0, 0);
}

std::unique_ptr<Communicator> CommunicatorBackend::split(int color, int key, const SplitOptions& options) {
  const OpLabel label{"split", calls_};
  const TraceSpan span(TraceKind::kCollective, trace_name(Collective::kSplit), label.operation);
  const uint64_t traced_as =
      splitmix64(traced_as_ ^ static_cast<uint64_t>(calls_) << 32 ^ static_cast<uint32_t>(color));
  agree({Collective::kSplit, label});
  split_options_ = options;
  std::unique_ptr<Communicator> out = make_split(color, key, label);
  if (out) {
    out->set_timeout(timeout_);
    if (hosts_.count() > 1) out->set_hosts(hosts_of(*out));
    out->set_lending(lending_);
    if (auto* const backend = dynamic_cast<CommunicatorBackend*>(out.get())) backend->traced_as_ = traced_as;
  }
  finish(nullptr, 0, 0);
  return out;
}

void CommunicatorBackend::set_hosts(const std::vector<int>& of) {
  if (of.size() != static_cast<size_t>(size_)) {
    throw Error(ErrorKind::kPlan, "comm",
                "the hosts of " + std::to_string(of.size()) + " ranks were given to a communicator of " +
                    std::to_string(size_) + ": expected one host for each rank");
  }
  hosts_ = RankHosts(of);
}

// The hosts of the ranks of a split, by the numbers that they have in this communicator.
std::vector<int> CommunicatorBackend::hosts_of(const Communicator& split) const {
  std::map<int, int> host_of;  // the key is the rank in the job
  for (int rank = 0; rank < size_; ++rank) host_of[in_job(rank)] = hosts_.of(rank);
  std::vector<int> of;
  for (int rank = 0; rank < split.size(); ++rank) of.push_back(host_of.at(split.in_job(rank)));
  return of;
}

void CommunicatorBackend::fail(ErrorKind kind, const std::string& why, bool raised) {
  raised_ = raised_ || raised;
  if (failed_) return;
  failed_ = true;
  failed_kind_ = kind;
  why_ = why;
}

void CommunicatorBackend::check_alive(OpLabel label) {
  if (!failed_) return;
  if (!std::exchange(raised_, true)) throw Error(failed_kind_, "comm", why_);
  throw DeadCommunicator(label, "this communicator is dead since an earlier failure: " + why_);
}

}  // namespace annulus
