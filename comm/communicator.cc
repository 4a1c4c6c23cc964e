// What every backend does alike around a transfer: see communicator.h.
#include "comm/communicator.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/checks.h"
#include "comm/headers.h"

namespace annulus {

using namespace comm_internal;

namespace {

// Of an exchange that had nothing to move.
class CompletedWork final : public Work {
 public:
  bool test() override { return true; }
  void wait() override {}
};

// Adds the messages that hold anything.
void count(const std::vector<Message>& messages, int64_t& number, int64_t& bytes) {
  for (const Message& message : messages) {
    const auto size = static_cast<int64_t>(message.tensor.nbytes());
    number += size > 0 ? 1 : 0;
    bytes += size;
  }
}

}  // namespace

// One call of a collective, as its header says it.
struct Communicator::Call {
  Collective collective;
  OpLabel label;
  const at::Tensor* brings = nullptr;  // the tensor whose shape and dtype all ranks must share
  int op = -1;                         // ReduceOp
  int root = -1;
};

void Communicator::check(const at::Tensor& tensor, const char* role, OpLabel label) const {
  check_tensor(tensor, device_, backend(), role, label);
}

std::unique_ptr<Work> Communicator::exchange(const std::vector<Message>& sends, const std::vector<Message>& receives,
                                             OpLabel label) {
  check_messages(sends, receives, size_, device_, backend(), label);
  look(label);
  check_alive(label);
  std::unique_ptr<Work> work = start_exchange(sends, receives, label);
  count(sends, stats_.messages_sent, stats_.bytes_sent);
  count(receives, stats_.messages_received, stats_.bytes_received);
  return work ? std::move(work) : std::make_unique<CompletedWork>();
}

// All ranks show what they are about to do. Raises the same Error(kMismatch) on all when it is not the same.
void Communicator::agree(const Call& call) {
  look(call.label);
  check_alive(call.label);
  const CollectiveHeader mine = make_header(call.collective, calls_++, call.brings, call.op, call.root, call.label);
  const std::vector<CollectiveHeader> all =
      gather_headers(mine, call.brings == nullptr ? at::Tensor() : *call.brings, call.label);
  require_same_headers(*this, all, call.label);
}

std::vector<CollectiveHeader> Communicator::gather_headers(const CollectiveHeader& mine, const at::Tensor&,
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
  // An operation of its own name, so that what differs is found by comparing the headers, all of them at once.
  channel.all_gather(all, one, {"agreement before a collective", 0});
  std::vector<CollectiveHeader> headers(static_cast<size_t>(size_));
  std::memcpy(headers.data(), all.const_data_ptr(), all.nbytes());
  return headers;
}

void Communicator::finish(std::unique_ptr<Work> work, size_t payload) {
  if (work) work->wait();
  ++stats_.collectives;
  stats_.collective_payload += static_cast<int64_t>(payload);
}

void Communicator::all_reduce(at::Tensor& tensor, ReduceOp op, OpLabel label) {
  check(tensor, "tensor", label);
  check_reducible(tensor, backend(), label);
  agree({Collective::kAllReduce, label, &tensor, static_cast<int>(op), -1});
  finish(tensor.nbytes() > 0 ? start_all_reduce(tensor, op, label) : nullptr, tensor.nbytes());
}

void Communicator::all_gather(at::Tensor& out, const at::Tensor& in, OpLabel label) {
  check(in, "input", label);
  check(out, "output", label);
  check_gather_shapes(out, "output", in, "input", size_, label);
  agree({Collective::kAllGather, label, &in, -1, -1});
  finish(in.nbytes() > 0 ? start_all_gather(out, in, label) : nullptr, out.nbytes());
}

void Communicator::reduce_scatter(at::Tensor& out, const at::Tensor& in, OpLabel label) {
  check(in, "input", label);
  check(out, "output", label);
  check_reducible(in, backend(), label);
  check_gather_shapes(in, "input", out, "output", size_, label);
  agree({Collective::kReduceScatter, label, &in, static_cast<int>(ReduceOp::kSum), -1});
  finish(out.nbytes() > 0 ? start_reduce_scatter(out, in, label) : nullptr, in.nbytes());
}

std::unique_ptr<Work> Communicator::begin_all_gather(const at::Tensor& out, const at::Tensor& in, OpLabel label) {
  at::Tensor into = out;
  all_gather(into, in, label);
  return std::make_unique<CompletedWork>();
}

std::unique_ptr<Work> Communicator::begin_reduce_scatter(const at::Tensor& out, const at::Tensor& in, OpLabel label) {
  at::Tensor into = out;
  reduce_scatter(into, in, label);
  return std::make_unique<CompletedWork>();
}

void Communicator::broadcast(at::Tensor& tensor, int root, OpLabel label) {
  check(tensor, "tensor", label);
  check_root(root, size_, label);
  agree({Collective::kBroadcast, label, &tensor, -1, root});
  finish(tensor.nbytes() > 0 ? start_broadcast(tensor, root, label) : nullptr, tensor.nbytes());
}

// Nobody has all headers before everybody has come.
void Communicator::barrier(OpLabel label) {
  agree({Collective::kBarrier, label});
  finish(nullptr, 0);
}

std::unique_ptr<Communicator> Communicator::split(int color, int key) {
  const OpLabel label{"split", calls_};
  agree({Collective::kSplit, label});
  std::unique_ptr<Communicator> out = make_split(color, key, label);
  if (out) out->set_timeout(timeout_);
  finish(nullptr, 0);
  return out;
}

void Communicator::fail(ErrorKind kind, const std::string& why, bool told) {
  told_ = told_ || told;
  if (failed_) return;
  failed_ = true;
  failed_kind_ = kind;
  why_ = why;
}

void Communicator::check_alive(OpLabel label) {
  if (!failed_) return;
  if (!std::exchange(told_, true)) throw Error(failed_kind_, "comm", why_);
  throw DeadCommunicator(label, "this communicator is dead since an earlier failure: " + why_);
}

std::vector<std::string> all_gather_text(Communicator& comm, std::string_view text, OpLabel label) {
  Communicator& host = comm.host();
  at::Tensor length = at::empty({1}, at::kLong);
  *length.mutable_data_ptr<int64_t>() = static_cast<int64_t>(text.size());
  at::Tensor lengths = at::empty({host.size(), 1}, at::kLong);
  host.all_gather(lengths, length, label);
  const int64_t* length_of = lengths.const_data_ptr<int64_t>();
  const int64_t longest = *std::max_element(length_of, length_of + host.size());
  std::vector<std::string> out(static_cast<size_t>(host.size()));
  if (longest == 0) return out;
  at::Tensor mine = at::zeros({longest}, at::kByte);
  if (!text.empty()) std::memcpy(mine.mutable_data_ptr(), text.data(), text.size());
  at::Tensor all = at::empty({host.size(), longest}, at::kByte);
  host.all_gather(all, mine, label);
  const char* data = static_cast<const char*>(all.const_data_ptr());
  for (int r = 0; r < host.size(); ++r) {
    out[static_cast<size_t>(r)].assign(data + r * longest, static_cast<size_t>(length_of[r]));
  }
  return out;
}

}  // namespace annulus
