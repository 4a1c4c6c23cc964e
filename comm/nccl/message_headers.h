// Headers that travel beside a transfer between GPUs, over a communicator of the hosts. The header of a message holds
// its number between its two ranks, its dtype and its size; that of a collective that was begun is a CollectiveHeader.
// NCCL itself would wait forever for a message of another size, or take it for the expected one. Used by
// nccl_communicator.cc and operation_watch.h. It uses neither CUDA nor NCCL.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.h"
#include "comm/headers.h"
#include "common/error.h"

namespace annulus::nccl_internal {

// The text of an error for use within another message of this package: without "[comm] ".
std::string plain(const Error& error);

struct HeaderResult {
  enum State { kPending, kAgree, kDiffer };
  State state = kAgree;
  std::string difference = {};  // "rank 1 sent 400 bytes (...), but rank 0 expected 200 bytes (...)"
};

class MessageHeaders {
 public:
  // channel: a communicator of the same ranks as the transfers. Nothing else may use it.
  explicit MessageHeaders(std::unique_ptr<Communicator> channel);

  // The exchange of the headers of one transfer that is under way.
  class Comparison {
   public:
    virtual ~Comparison() = default;
    // Does not block. Raises Error(kComm) if headers have not come within the deadline.
    virtual HeaderResult result() = 0;
  };

  // Starts to exchange the headers of an exchange. Null if no message has elements. Messages without elements send no
  // header, but are counted, so that a peer that expects data notices the missing message.
  std::unique_ptr<Comparison> start(const std::vector<Message>& sends, const std::vector<Message>& receives,
                                    Seconds timeout);
  // Starts to exchange the headers of a collective, even if it has no elements. All ranks start them in the same order.
  std::unique_ptr<Comparison> start_collective(const comm_internal::CollectiveHeader& mine, std::string_view counted,
                                               Seconds timeout);

 private:
  std::shared_ptr<Communicator> channel_;
  std::vector<int64_t> sent_;  // the number of messages so far, by peer
  std::vector<int64_t> received_;
};

}  // namespace annulus::nccl_internal
