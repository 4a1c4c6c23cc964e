// The part of the backend over process groups that carries tensors on a device: the group's backend for the device
// (NCCL) transfers them, and the ranks agree over the communicator of their hosts. No GPU has run it.
//
// - Hosts compare a transfer before it is given to the device, because it cannot be withdrawn from there: abort() of a
//   group would end the program's own traffic as well. So a host waits in exchange() until the ranks that it receives
//   from send, and in a collective, also in one that is begun, for all ranks. It never waits for the device.
// - c10d orders a transfer after the work that is on the current stream when it starts, and in Work::wait() orders the
//   current stream after the transfer. Tensors are kept until then.
// - Deadlines apply to the hosts. The group's own timeout ends a transfer that hangs on the device.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "comm/c10d/internal.h"
#include "comm/checks.h"
#include "comm/communicator_backend.h"
#include "comm/headers.h"
#include "comm/transfer_state.h"
#include "common/error.h"

namespace annulus::c10d_internal {
namespace {

using namespace comm_internal;

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

constexpr int kTag = 1 << 29;  // one tag for all messages, because NCCL ignores tags

c10d::ReduceOp c10d_op(ReduceOp op) {
  return op == ReduceOp::kSum ? c10d::ReduceOp::SUM : op == ReduceOp::kMax ? c10d::ReduceOp::MAX : c10d::ReduceOp::MIN;
}

// Data that are only moved travel as bytes, a dtype that every backend supports.
at::Tensor as_bytes(const at::Tensor& tensor) { return tensor.view({-1}).view(at::kByte); }

// The description of a message that hosts exchange: its number, dtype and size in bytes.
struct Words {
  static constexpr int64_t kCount = 3;
  static at::Tensor of(int64_t number, const at::Tensor& tensor) {
    at::Tensor words = at::empty({kCount}, at::kLong);
    auto* data = words.mutable_data_ptr<int64_t>();
    data[0] = number;
    data[1] = static_cast<int64_t>(tensor.scalar_type());
    data[2] = static_cast<int64_t>(tensor.nbytes());
    return words;
  }
  static std::string text(const at::Tensor& words) {
    const auto* data = words.const_data_ptr<int64_t>();
    return comm_internal::describe_message(data[2], data[0], static_cast<at::ScalarType>(data[1]));
  }
};

class DeviceCommunicator final : public CommunicatorBackend {
 public:
  // members: the ranks by their numbers in the group. host and headers: two communicators of the hosts of these ranks;
  // `headers` carries only the descriptions of messages.
  DeviceCommunicator(BackendPtr backend, at::Device device, std::vector<int> members,
                     std::unique_ptr<Communicator> host, std::unique_ptr<Communicator> headers)
      : CommunicatorBackend(host->rank(), host->size(), device),
        backend_(std::move(backend)),
        members_(std::move(members)),
        host_(std::move(host)),
        headers_(std::move(headers)),
        sent_(members_.size(), 0),
        received_(members_.size(), 0) {
    std::vector<int> all(static_cast<size_t>(backend_->getSize()));
    std::iota(all.begin(), all.end(), 0);
    whole_ = members_ == all;
    hosts_ = host_->hosts();
  }

  std::string_view backend() const override { return "c10d"; }
  int in_job(int rank) const override { return host_->in_job(rank); }
  Communicator& host() override {
    host_->set_timeout(timeout_);
    return *host_;
  }

  void progress() override {
    host_->progress();
    while (!header_sends_.empty() && header_sends_.front()->test()) header_sends_.pop_front();
  }

 protected:
  std::vector<CollectiveHeader> gather_headers(const CollectiveHeader& mine, const at::Tensor& brings,
                                               OpLabel label) override {
    try {
      return CommunicatorBackend::gather_headers(mine, brings, label);
    } catch (const Error& e) {
      die(std::string(e.message()));
      throw;
    }
  }

  std::unique_ptr<StartedOperation> start_exchange(const std::vector<Message>& sends,
                                                   const std::vector<Message>& receives, OpLabel label) override;
  std::unique_ptr<StartedOperation> start_all_reduce(at::Tensor& tensor, ReduceOp op, OpLabel label) override;
  std::unique_ptr<StartedOperation> start_broadcast(at::Tensor& tensor, int root, OpLabel label) override;
  std::unique_ptr<StartedOperation> begin(const Begun& call) override;
  bool adds_in_rank_order() const override { return false; }
  std::unique_ptr<Communicator> make_split(int color, int key, OpLabel label) override;

 private:
  class Operation;

  void die(const std::string& why) { fail(ErrorKind::kComm, why, /*raised=*/true); }

  void compare(const std::vector<Message>& sends, const std::vector<Message>& receives, OpLabel label);
  std::unique_ptr<StartedOperation> start(std::vector<at::Tensor> held, OpLabel label,
                                          const std::function<Works()>& issue);
  Works start_messages(const std::vector<Message>& sends, const std::vector<Message>& receives) const;
  Works start_with_all(const std::function<at::Tensor(int)>& sent, const at::Tensor& to) const;
  std::unique_ptr<StartedOperation> gather(const at::Tensor& out, const at::Tensor& in, OpLabel label);

  BackendPtr backend_;
  std::vector<int> members_;
  bool whole_ = false;  // members_ are all ranks of the group in order, so the group's collectives can be used
  std::unique_ptr<Communicator> host_, headers_;
  std::vector<int64_t> sent_;  // the number of messages so far, by peer
  std::vector<int64_t> received_;
  std::deque<std::unique_ptr<Work>> header_sends_;   // sends of descriptions that may not be complete
  std::deque<at::Tensor> own_sends_, own_receives_;  // messages from this rank to itself, in order
};

class DeviceCommunicator::Operation final : public StartedOperation {
 public:
  Operation(DeviceCommunicator& comm, Works works, std::vector<at::Tensor> held, OpLabel label)
      : comm_(comm), works_(std::move(works)), held_(std::move(held)), label_(label) {}

  bool test() override {
    comm_.progress();
    for (const auto& work : works_) {
      if (!work->isCompleted()) return false;
      if (work->exception()) raise(work->exception());
    }
    wait();
    return true;
  }

  bool wait() override {
    const c10::DeviceGuard on_device(comm_.device_);
    if (std::exchange(waited_, true)) return false;
    for (const auto& work : works_) {
      try {
        work->wait();
      } catch (const std::exception&) {
        raise(std::current_exception());
      }
    }
    held_.clear();
    return false;
  }

  void abandon() override {
    comm_.die(where(label_) + ": abandoned after another error");
    [[maybe_unused]] const auto* leaked = new std::pair(works_, held_);
  }

 private:
  [[noreturn]] void raise(const std::exception_ptr& exception) {
    try {
      std::rethrow_exception(exception);
    } catch (const std::exception& e) {
      comm_.die(where(label_) + ": " + in_short(e));
      [[maybe_unused]] const auto* leaked = new std::pair(works_, held_);  // the group may still use them
      throw_comm(label_, std::string("the process group failed: ") + in_short(e));
    }
  }

  DeviceCommunicator& comm_;
  Works works_;
  std::vector<at::Tensor> held_;
  OpLabel label_;
  bool waited_ = false;
};

// Gives the transfers that `issue` starts to the device, and keeps `held` until they are waited for.
std::unique_ptr<StartedOperation> DeviceCommunicator::start(std::vector<at::Tensor> held, OpLabel label,
                                                            const std::function<Works()>& issue) {
  const c10::DeviceGuard on_device(device_);
  try {
    return std::make_unique<Operation>(*this, issue(), std::move(held), label);
  } catch (const std::exception& e) {
    die(where(label) + ": " + in_short(e));
    throw_comm(label, std::string("the process group refused a transfer: ") + in_short(e));
  }
}

// Starts messages as one group (coalesced, if the backend supports it), so that their order cannot make ranks wait for
// each other in a cycle.
Works DeviceCommunicator::start_messages(const std::vector<Message>& sends,
                                         const std::vector<Message>& receives) const {
  Works works;
  if (sends.empty() && receives.empty()) return works;
  const bool together = backend_->supportsCoalescing();
  if (together) backend_->startCoalescing();
  const auto issue = [&](const Message& message, bool is_send) {
    std::vector<at::Tensor> tensors{message.tensor};
    const int peer = members_[static_cast<size_t>(message.peer)];
    works.push_back(is_send ? backend_->send(tensors, peer, kTag) : backend_->recv(tensors, peer, kTag));
  };
  for (const Message& message : receives) issue(message, false);
  for (const Message& message : sends) issue(message, true);
  if (together) works = {backend_->endCoalescing()};
  return works;
}

// Sends sent(r) to each other rank r, and receives to[r] from it.
Works DeviceCommunicator::start_with_all(const std::function<at::Tensor(int)>& sent, const at::Tensor& to) const {
  std::vector<Message> sends, receives;
  for (int i = 1; i < size_; ++i) {
    const int next = (rank_ + i) % size_, previous = (rank_ + size_ - i) % size_;
    sends.push_back({sent(next), next});
    receives.push_back({to[previous], previous});
  }
  return start_messages(sends, receives);
}

// The hosts exchange descriptions of their messages. A mismatch is raised before the device gets any of them.
void DeviceCommunicator::compare(const std::vector<Message>& sends, const std::vector<Message>& receives,
                                 OpLabel label) {
  std::vector<Message> descriptions, came;
  std::vector<at::Tensor> expected;
  for (const Message& message : sends) {
    const int64_t number = sent_[static_cast<size_t>(message.peer)]++;
    if (message.tensor.nbytes() > 0) descriptions.push_back({Words::of(number, message.tensor), message.peer});
  }
  for (const Message& message : receives) {
    const int64_t number = received_[static_cast<size_t>(message.peer)]++;
    if (message.tensor.nbytes() == 0) continue;  // it is counted, so that a peer that does send data is noticed
    expected.push_back(Words::of(number, message.tensor));
    came.push_back({at::empty({Words::kCount}, at::kLong), message.peer});
  }
  headers_->set_timeout(timeout_);
  header_sends_.push_back(headers_->exchange(descriptions, {}, label));
  headers_->exchange({}, came, label)->wait();
  for (size_t i = 0; i < came.size(); ++i) {
    if (at::equal(came[i].tensor, expected[i])) continue;
    throw_mismatch(label,
                   describe_mismatch(*this, came[i].peer, Words::text(came[i].tensor), Words::text(expected[i])));
  }
}

std::unique_ptr<StartedOperation> DeviceCommunicator::start_exchange(const std::vector<Message>& sends,
                                                                     const std::vector<Message>& receives,
                                                                     OpLabel label) {
  try {
    progress();
    compare(sends, receives, label);
  } catch (const Error& e) {
    die(std::string(e.message()));
    throw;
  }
  std::vector<at::Tensor> held;
  const auto of_others = [&](const std::vector<Message>& messages, std::deque<at::Tensor>& own) {
    std::vector<Message> out;
    for (const Message& message : messages) {
      if (message.tensor.nbytes() == 0) continue;
      if (message.peer == rank_) {
        own.push_back(message.tensor);
      } else {
        out.push_back(message);
        held.push_back(message.tensor);
      }
    }
    return out;
  };
  const std::vector<Message> out = of_others(sends, own_sends_), in = of_others(receives, own_receives_);
  while (!own_sends_.empty() && !own_receives_.empty()) {
    own_receives_.front().view({-1}).copy_(own_sends_.front().view({-1}), /*non_blocking=*/true);
    own_sends_.pop_front();
    own_receives_.pop_front();
  }
  return start(std::move(held), label, [&] { return start_messages(out, in); });
}

// An all_gather among a part of the group's ranks, by messages. A reduction that follows waits for them on the current
// stream; the host does not wait.
std::unique_ptr<StartedOperation> DeviceCommunicator::gather(const at::Tensor& out, const at::Tensor& in,
                                                             OpLabel label) {
  const at::Tensor mine = out[rank_];
  if (mine.const_data_ptr() != in.const_data_ptr()) mine.copy_(in, /*non_blocking=*/true);
  return start({out, in}, label, [&] { return start_with_all([&](int) { return in; }, out); });
}

// The sum, the maximum or the minimum of parts [ranks, ...] over the ranks, in their order. bf16 is computed in fp32.
at::Tensor reduce(const at::Tensor& parts, ReduceOp op) {
  const at::Tensor wide = parts.scalar_type() == at::kBFloat16 ? parts.to(at::kFloat) : parts;
  at::Tensor sum = wide[0].clone();
  for (int64_t r = 1; r < wide.size(0); ++r) {
    if (op == ReduceOp::kSum) {
      sum.add_(wide[r]);
    } else {
      sum = op == ReduceOp::kMax ? at::maximum(sum, wide[r]) : at::minimum(sum, wide[r]);
    }
  }
  return sum;
}

std::unique_ptr<StartedOperation> DeviceCommunicator::begin(const Begun& call) {
  require_same_headers(*this, gather_headers(call.header, call.in, call.label), call.label);
  at::Tensor out = call.out, in = call.in;
  if (in.nbytes() == 0) return nullptr;
  if (call.collective() == Collective::kAllReduce) return start_all_reduce(in, call.op(), call.label);
  if (whole_) {
    return start({out, in}, call.label, [&]() -> Works {
      if (call.reduces()) {
        at::Tensor to = out.view({-1}), from = in.view({-1});
        return {backend_->_reduce_scatter_base(to, from)};
      }
      at::Tensor to = as_bytes(out), from = as_bytes(in);
      return {backend_->_allgather_base(to, from)};
    });
  }
  if (!call.reduces()) return gather(out, in, call.label);
  const at::Tensor parts = at::empty_like(in);
  parts[rank_].copy_(in[rank_], /*non_blocking=*/true);
  start({parts, in}, call.label, [&] { return start_with_all([&](int peer) { return in[peer]; }, parts); })->wait();
  out.copy_(reduce(parts, ReduceOp::kSum));
  return nullptr;
}

std::unique_ptr<StartedOperation> DeviceCommunicator::start_all_reduce(at::Tensor& tensor, ReduceOp op, OpLabel label) {
  if (whole_) {
    return start({tensor}, label, [&]() -> Works {
      std::vector<at::Tensor> tensors{tensor};
      c10d::AllreduceOptions options;
      options.reduceOp = c10d_op(op);
      return {backend_->allreduce(tensors, options)};
    });
  }
  const at::Tensor parts = at::empty({size_, tensor.numel()}, tensor.options());
  gather(parts, tensor.view({-1}), label)->wait();
  tensor.view({-1}).copy_(reduce(parts, op));
  return nullptr;
}

std::unique_ptr<StartedOperation> DeviceCommunicator::start_broadcast(at::Tensor& tensor, int root, OpLabel label) {
  if (whole_) {
    return start({tensor}, label, [&]() -> Works {
      std::vector<at::Tensor> tensors{as_bytes(tensor)};
      c10d::BroadcastOptions options;
      options.rootRank = root;
      return {backend_->broadcast(tensors, options)};
    });
  }
  std::vector<Message> sends, receives;
  if (rank_ != root) receives.push_back({tensor, root});
  for (int i = 1; rank_ == root && i < size_; ++i) sends.push_back({tensor, (rank_ + i) % size_});
  return start({tensor}, label, [&] { return start_messages(sends, receives); });
}

std::unique_ptr<Communicator> DeviceCommunicator::make_split(int color, int key, OpLabel label) {
  std::unique_ptr<Communicator> host = this->host().split(color, key);
  if (!host) return nullptr;
  at::Tensor mine = at::empty({1}, at::kLong), all = at::empty({host->size(), 1}, at::kLong);
  *mine.mutable_data_ptr<int64_t>() = members_[static_cast<size_t>(rank_)];
  host->all_gather(all, mine, label);
  const auto* numbers = all.const_data_ptr<int64_t>();
  std::vector<int> members(numbers, numbers + host->size());
  std::unique_ptr<Communicator> headers = host->split(0, host->rank());
  return std::make_unique<DeviceCommunicator>(backend_, device_, std::move(members), std::move(host),
                                              std::move(headers));
}

}  // namespace

std::unique_ptr<Communicator> make_device_communicator(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                                       at::Device device, std::unique_ptr<Communicator> host) {
  BackendPtr backend;
  try {
    backend = group->getBackend(device.type());
  } catch (const c10::Error&) {
    throw Error(ErrorKind::kUsage, "comm",
                "the process group \"" + group->getGroupName() + "\" has no backend for tensors on " + device.str() +
                    ": make it with one, as with init_process_group(\"cpu:gloo,cuda:nccl\")");
  }
  std::vector<int> members(static_cast<size_t>(host->size()));
  std::iota(members.begin(), members.end(), 0);
  std::unique_ptr<Communicator> headers = host->split(0, host->rank());
  return std::make_unique<DeviceCommunicator>(std::move(backend), device, std::move(members), std::move(host),
                                              std::move(headers));
}

}  // namespace annulus::c10d_internal
