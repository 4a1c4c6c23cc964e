// What travels beside a transfer between GPUs, over a communicator of the hosts: of a message, which one of its two
// ranks it is, its dtype and its size; of a collective that was begun, what every rank is about to do. NCCL itself
// waits for ever for a message of another size, or takes it for the one expected. Used by nccl_communicator.cc and the
// watch; knows neither CUDA nor NCCL.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.h"
#include "comm/headers.h"

namespace annulus::nccl_internal {

// An error's words, to be said within another message of this room.
std::string plain(const Error& error);

struct HeaderVerdict {
  enum State { kPending, kAgree, kDiffer };
  State state = kAgree;
  std::string difference = {};  // "rank 1 sent 400 bytes (...), but rank 0 expected 200 bytes (...)"
};

class MessageHeaders {
 public:
  // channel: over the same ranks as the transfers; nothing else may use it.
  explicit MessageHeaders(std::unique_ptr<Communicator> channel);

  // The headers of one transfer under way.
  class Comparison {
   public:
    virtual ~Comparison() = default;
    // Does not block. Raises Error(kComm) when headers have not come within the deadline.
    virtual HeaderVerdict look() = 0;
  };

  // Starts the headers of an exchange; null where no message holds anything. Empty messages move nothing, but are
  // counted, so that a peer that does expect data finds the gap.
  std::unique_ptr<Comparison> start(const std::vector<Message>& sends, const std::vector<Message>& receives,
                                    Seconds timeout);
  // Starts those of a collective, also of one that moves nothing. All ranks start them in the same order.
  std::unique_ptr<Comparison> start_collective(const comm_internal::CollectiveHeader& mine, std::string_view counted,
                                               Seconds timeout);

 private:
  std::shared_ptr<Communicator> channel_;
  std::vector<int64_t> sent_;  // messages so far, by peer
  std::vector<int64_t> received_;
};

}  // namespace annulus::nccl_internal
