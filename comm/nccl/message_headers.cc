// See message_headers.h.
#include "comm/nccl/message_headers.h"

#include <ATen/ops/empty.h>

#include <cstring>
#include <utility>

#include "comm/transfer_state.h"

namespace annulus::nccl_internal {

using comm_internal::CollectiveHeader;
using comm_internal::describe_message;
using comm_internal::describe_mismatch;

namespace {

using Comparison = MessageHeaders::Comparison;

constexpr int64_t kWords = 3;  // of a header: number of the message between the two ranks, dtype, bytes

class ExchangeComparison final : public Comparison {
 public:
  struct Expected {
    at::Tensor came;
    int peer = 0;
    int64_t sequence = 0;
    at::ScalarType dtype = at::kByte;
    int64_t bytes = 0;
  };

  explicit ExchangeComparison(std::shared_ptr<Communicator> channel) : channel_(std::move(channel)) {}

  HeaderResult result() override {
    if (!work_) return {};
    if (!work_->test()) return {HeaderResult::kPending};
    work_.reset();
    for (const Expected& e : expected_) {
      const auto* came = e.came.const_data_ptr<int64_t>();
      if (came[0] == e.sequence && came[1] == static_cast<int64_t>(e.dtype) && came[2] == e.bytes) continue;
      const std::string sent = describe_message(came[2], came[0], static_cast<at::ScalarType>(came[1]));
      return {HeaderResult::kDiffer,
              describe_mismatch(*channel_, e.peer, sent, describe_message(e.bytes, e.sequence, e.dtype))};
    }
    expected_.clear();
    sent_.clear();
    return {};
  }

  std::shared_ptr<Communicator> channel_;  // shared, because it must outlive work_
  std::vector<Expected> expected_;
  std::vector<at::Tensor> sent_;
  std::unique_ptr<Work> work_;
};

class CollectiveComparison final : public Comparison {
 public:
  CollectiveComparison(std::shared_ptr<Communicator> channel, const CollectiveHeader& mine, std::string_view counted)
      : channel_(std::move(channel)),
        counted_(counted),
        all_(at::empty({channel_->size(), static_cast<int64_t>(sizeof mine)}, at::kByte)) {
    at::Tensor one = at::empty({static_cast<int64_t>(sizeof mine)}, at::kByte);
    std::memcpy(one.mutable_data_ptr(), &mine, sizeof mine);
    work_ = channel_->begin_all_gather(all_, one, {"headers of a collective on GPUs", 0});
  }

  HeaderResult result() override {
    if (!work_) return {};
    if (!work_->test()) return {HeaderResult::kPending};
    work_.reset();
    std::vector<CollectiveHeader> headers(static_cast<size_t>(channel_->size()));
    std::memcpy(headers.data(), all_.const_data_ptr(), all_.nbytes());
    std::string differences = comm_internal::describe_disagreement(*channel_, headers, counted_);
    if (!differences.empty()) return {HeaderResult::kDiffer, std::move(differences)};
    return {};
  }

 private:
  std::shared_ptr<Communicator> channel_;  // shared, because it must outlive work_
  std::string counted_;
  at::Tensor all_;
  std::unique_ptr<Work> work_;
};

}  // namespace

std::string plain(const Error& error) { return std::string(error.module() == "comm" ? error.message() : error.what()); }

MessageHeaders::MessageHeaders(std::unique_ptr<Communicator> channel)
    : channel_(std::move(channel)),
      sent_(static_cast<size_t>(channel_->size()), 0),
      received_(static_cast<size_t>(channel_->size()), 0) {}

std::unique_ptr<Comparison> MessageHeaders::start(const std::vector<Message>& sends,
                                                  const std::vector<Message>& receives, Seconds timeout) {
  auto comparison = std::make_unique<ExchangeComparison>(channel_);
  std::vector<Message> header_sends, header_receives;
  for (const Message& message : receives) {
    const int64_t sequence = received_[static_cast<size_t>(message.peer)]++;
    const auto bytes = static_cast<int64_t>(message.tensor.nbytes());
    if (bytes == 0) continue;
    const at::Tensor came = at::empty({kWords}, at::kLong);
    comparison->expected_.push_back({came, message.peer, sequence, message.tensor.scalar_type(), bytes});
    header_receives.push_back({came, message.peer});
  }
  for (const Message& message : sends) {
    const int64_t sequence = sent_[static_cast<size_t>(message.peer)]++;
    const auto bytes = static_cast<int64_t>(message.tensor.nbytes());
    if (bytes == 0) continue;
    at::Tensor header = at::empty({kWords}, at::kLong);
    auto* words = header.mutable_data_ptr<int64_t>();
    words[0] = sequence;
    words[1] = static_cast<int64_t>(message.tensor.scalar_type());
    words[2] = bytes;
    comparison->sent_.push_back(header);
    header_sends.push_back({header, message.peer});
  }
  if (header_sends.empty() && header_receives.empty()) return nullptr;
  channel_->set_timeout(timeout);
  comparison->work_ = channel_->exchange(header_sends, header_receives, {"headers of an exchange on GPUs", 0});
  return comparison;
}

std::unique_ptr<Comparison> MessageHeaders::start_collective(const CollectiveHeader& mine, std::string_view counted,
                                                             Seconds timeout) {
  channel_->set_timeout(timeout);
  return std::make_unique<CollectiveComparison>(channel_, mine, counted);
}

}  // namespace annulus::nccl_internal
