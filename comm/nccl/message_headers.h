// What travels beside a message between GPUs, over a communicator of the hosts: which message of its two ranks it is,
// its dtype and its size. NCCL itself waits for ever for a message of another size, or takes it for the one expected.
// Used by nccl_communicator.cc and the watch; knows neither CUDA nor NCCL.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"

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

  // The headers of one exchange under way.
  class Comparison {
   public:
    // Does not block. Raises Error(kComm) when headers have not come within the deadline.
    HeaderVerdict look();

   private:
    friend class MessageHeaders;
    struct Expected {
      at::Tensor came;
      int peer = 0;
      int64_t sequence = 0;
      at::ScalarType dtype = at::kByte;
      int64_t bytes = 0;
    };
    std::shared_ptr<Communicator> channel_;  // outlives work_, whatever becomes of its owner
    int rank_ = 0;
    std::vector<Expected> expected_;
    std::vector<at::Tensor> sent_;
    std::unique_ptr<Work> work_;
  };

  // Starts the headers of an exchange; null where no message holds anything. Empty messages move nothing, but are
  // counted, so that a peer that does expect data finds the gap.
  std::unique_ptr<Comparison> start(const std::vector<Message>& sends, const std::vector<Message>& receives,
                                    Seconds timeout);

 private:
  std::shared_ptr<Communicator> channel_;
  std::vector<int64_t> sent_;  // messages so far, by peer
  std::vector<int64_t> received_;
};

}  // namespace annulus::nccl_internal
