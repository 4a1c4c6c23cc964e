// See backend.h.
#include "backend.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>

#include <cstdlib>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

namespace {

using annulus::Communicator;
using annulus::Message;
using annulus::OpLabel;
using annulus::ReduceOp;
using annulus::Work;

bool planted(std::string_view bug) {
  const char* const name = std::getenv("RING_BUG");
  return name != nullptr && bug == name;
}

// Keeps the memory of messages until they have left.
class StagedWork final : public Work {
 public:
  StagedWork(std::unique_ptr<Work> work, std::vector<Message> staged)
      : staged_(std::move(staged)), work_(std::move(work)) {}
  bool test() override { return work_->test(); }
  void wait() override { work_->wait(); }

 private:
  std::vector<Message> staged_;
  std::unique_ptr<Work> work_;  // destroyed first: it waits
};

class Staging final : public Communicator {
 public:
  explicit Staging(Communicator& comm) : comm_(comm) { comm_.set_lending(false); }
  explicit Staging(std::unique_ptr<Communicator> comm) : owned_(std::move(comm)), comm_(*owned_) {
    comm_.set_lending(false);
  }

  std::unique_ptr<Work> exchange(const std::vector<Message>& sends, const std::vector<Message>& receives,
                                 OpLabel label) override {
    std::vector<Message> staged;
    for (const Message& message : sends) {
      staged.push_back({is_sendable(message.tensor) ? copy(message.tensor) : message.tensor, message.peer});
    }
    std::unique_ptr<Work> work = comm_.exchange(staged, receives, label);
    return std::make_unique<StagedWork>(std::move(work), std::move(staged));
  }
  std::unique_ptr<Communicator> split(int color, int key, const annulus::SplitOptions& options) override {
    std::unique_ptr<Communicator> part = comm_.split(color, key, options);
    return part ? std::make_unique<Staging>(std::move(part)) : nullptr;
  }

  // The rest is that of the communicator below.
  int rank() const override { return comm_.rank(); }
  int size() const override { return comm_.size(); }
  std::string_view backend() const override { return "staging"; }
  int in_job(int rank) const override { return comm_.in_job(rank); }
  Communicator& host() override { return &comm_.host() == &comm_ ? *this : comm_.host(); }
  const annulus::RankHosts& hosts() const override { return comm_.hosts(); }
  void set_hosts(const std::vector<int>& of) override { comm_.set_hosts(of); }
  annulus::Seconds timeout() const override { return comm_.timeout(); }
  void set_timeout(annulus::Seconds timeout) override { comm_.set_timeout(timeout); }
  bool lends_to(int) const override { return false; }
  at::Tensor lendable(at::IntArrayRef sizes, const at::TensorOptions& options) override {
    return comm_.lendable(sizes, options);
  }
  void set_lending(bool) override {}
  void all_reduce(at::Tensor& x, ReduceOp op, OpLabel label) override { comm_.all_reduce(x, op, label); }
  void all_gather(at::Tensor& out, const at::Tensor& in, OpLabel label) override { comm_.all_gather(out, in, label); }
  void reduce_scatter(at::Tensor& out, const at::Tensor& in, OpLabel label) override {
    comm_.reduce_scatter(out, in, label);
  }
  void broadcast(at::Tensor& x, int root, OpLabel label) override { comm_.broadcast(x, root, label); }
  void barrier(OpLabel label) override { comm_.barrier(label); }
  std::unique_ptr<Work> begin_all_reduce(const at::Tensor& x, ReduceOp op, OpLabel label) override {
    return comm_.begin_all_reduce(x, op, label);
  }
  std::unique_ptr<Work> begin_all_gather(const at::Tensor& out, const at::Tensor& in, OpLabel label) override {
    return comm_.begin_all_gather(out, in, label);
  }
  std::unique_ptr<Work> begin_reduce_scatter(const at::Tensor& out, const at::Tensor& in, OpLabel label) override {
    return comm_.begin_reduce_scatter(out, in, label);
  }
  int64_t reduce_scatter_holds(int64_t payload) const override { return comm_.reduce_scatter_holds(payload); }
  int64_t number_call() override { return comm_.number_call(); }
  void progress() override { comm_.progress(); }
  const annulus::CommStats& stats() const override { return comm_.stats(); }

 private:
  // What is not is refused by the communicator below.
  static bool is_sendable(const at::Tensor& tensor) {
    return tensor.defined() && tensor.is_contiguous() && (tensor.numel() == 0 || tensor.const_data_ptr() != nullptr);
  }
  at::Tensor copy(const at::Tensor& tensor) {
    if (!planted("one buffer")) return tensor.clone();
    at::Tensor& buffer = buffers_[{tensor.scalar_type(), tensor.numel()}];
    if (!buffer.defined()) buffer = at::empty_like(tensor);
    return buffer.view(tensor.sizes()).copy_(tensor);
  }

  std::unique_ptr<Communicator> owned_;
  Communicator& comm_;
  std::map<std::pair<at::ScalarType, int64_t>, at::Tensor> buffers_;
};

}  // namespace

std::unique_ptr<Communicator> staging(Communicator& comm) { return std::make_unique<Staging>(comm); }
