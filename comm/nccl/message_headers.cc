// See message_headers.h.
#include "comm/nccl/message_headers.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "comm/checks.h"

namespace annulus::nccl_internal {

using comm_internal::dtype_name;

namespace {

constexpr int64_t kWords = 3;  // number of the message between the two ranks, dtype, bytes

std::string describe(int64_t bytes, int64_t sequence, int64_t dtype) {
  return std::to_string(bytes) + " bytes (message " + std::to_string(sequence) + " between these ranks, " +
         dtype_name(static_cast<at::ScalarType>(dtype)) + ")";
}

}  // namespace

std::string plain(const Error& error) { return std::string(error.room() == "comm" ? error.message() : error.what()); }

MessageHeaders::MessageHeaders(std::unique_ptr<Communicator> channel)
    : channel_(std::move(channel)),
      sent_(static_cast<size_t>(channel_->size()), 0),
      received_(static_cast<size_t>(channel_->size()), 0) {}

std::unique_ptr<MessageHeaders::Comparison> MessageHeaders::start(const std::vector<Message>& sends,
                                                                  const std::vector<Message>& receives,
                                                                  Seconds timeout) {
  auto comparison = std::make_unique<Comparison>();
  comparison->rank_ = channel_->rank();
  comparison->channel_ = channel_;
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

HeaderVerdict MessageHeaders::Comparison::look() {
  if (!work_) return {};
  if (!work_->test()) return {HeaderVerdict::kPending};
  work_.reset();
  for (const Expected& e : expected_) {
    const auto* came = e.came.const_data_ptr<int64_t>();
    if (came[0] == e.sequence && came[1] == static_cast<int64_t>(e.dtype) && came[2] == e.bytes) continue;
    return {HeaderVerdict::kDiffer, comm_internal::describe_ranks(*channel_, {e.peer}) + " sent " +
                                        describe(came[2], came[0], came[1]) + ", but " +
                                        comm_internal::describe_ranks(*channel_, {rank_}) + " expected " +
                                        describe(e.bytes, e.sequence, static_cast<int64_t>(e.dtype))};
  }
  expected_.clear();
  sent_.clear();
  return {};
}

}  // namespace annulus::nccl_internal
