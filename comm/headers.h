// What ranks show each other before a collective, and what is said when it differs. Internal to comm/: communicator.cc
// makes and compares headers, backends carry them as bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace annulus::comm_internal {

enum class Collective : int8_t { kAllReduce = 1, kAllGather, kReduceScatter, kBroadcast, kBarrier, kSplit };
const char* collective_name(int8_t collective);  // "all_reduce"

// What a rank is about to do. Travels as raw bytes between ranks of one build (bootstrap has compared versions).
struct CollectiveHeader {
  static constexpr int kMaxDims = 6;
  static constexpr int kLabelBytes = 48;
  int8_t collective = 0;
  int8_t dtype = -1;      // at::ScalarType
  int8_t reduce_op = -1;  // ReduceOp
  int8_t dims = 0;
  int32_t root = -1;
  int64_t call = 0;              // collectives of this communicator so far
  int64_t number = 0;            // of the label
  int64_t shape[kMaxDims] = {};  // more dimensions are folded into the first
  char label[kLabelBytes] = {};  // cut off
};
static_assert(sizeof(CollectiveHeader) == 120);

// An all_gather, a reduce_scatter or an all_reduce that does not block, as a backend gets it.
struct Begun {
  CollectiveHeader header;
  at::Tensor out, in;  // of an all_reduce the same
  OpLabel label;
  // The backend adds the bytes that this rank sends to ranks of other hosts; read when the call is complete.
  std::shared_ptr<int64_t> to_other_hosts;

  Collective collective() const { return static_cast<Collective>(header.collective); }
  bool reduces() const { return collective() != Collective::kAllGather; }
  ReduceOp op() const { return static_cast<ReduceOp>(header.reduce_op); }
  const char* name() const { return collective_name(header.collective); }
  // All ranks' parts, one after the other.
  const at::Tensor& whole() const { return collective() == Collective::kAllGather ? out : in; }
};

// tensor may be null (barrier, split).
CollectiveHeader make_header(Collective collective, int64_t call, const at::Tensor* tensor, int reduce_op, int root,
                             OpLabel label);
// "ranks disagree in all_gather: shape is [6] on rank 0, [5] on rank 1", of the headers of a communicator's ranks in
// rank order; empty where they are the same. counted: OpLabel::counted of the call.
std::string describe_disagreement(const Communicator& comm, const std::vector<CollectiveHeader>& headers,
                                  std::string_view counted);
// Error(kMismatch) on every rank when the headers differ.
void require_same_headers(const Communicator& comm, const std::vector<CollectiveHeader>& headers, OpLabel label);

}  // namespace annulus::comm_internal
