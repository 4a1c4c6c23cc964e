// What ranks show each other before a collective, and what is said when it differs. Internal to comm/: communicator.cc
// makes and compares headers, backends carry them as bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace annulus::comm_internal {

enum class Collective : int8_t { kAllReduce = 1, kAllGather, kReduceScatter, kBroadcast, kBarrier, kSplit };

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

// An all_gather or a reduce_scatter that does not block, as a backend gets it.
struct Begun {
  CollectiveHeader header;
  at::Tensor out, in;
  OpLabel label;
  bool reduces() const { return header.collective == static_cast<int8_t>(Collective::kReduceScatter); }
  const char* name() const { return reduces() ? "reduce_scatter" : "all_gather"; }
  // What every rank gives to, or gets from, each.
  const at::Tensor& piece() const { return reduces() ? out : in; }
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
