// The headers that ranks exchange before a collective, and the error message for headers that differ. Internal to
// comm/: communicator.cc makes headers and compares them, and backends carry them as bytes.
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

// The collective that a rank is about to call. Headers travel as raw bytes between ranks of the same build (bootstrap
// has compared versions).
struct CollectiveHeader {
  static constexpr int kMaxDims = 6;
  static constexpr int kLabelBytes = 48;
  int8_t collective = 0;
  int8_t dtype = -1;      // at::ScalarType
  int8_t reduce_op = -1;  // ReduceOp
  int8_t dims = 0;
  int32_t root = -1;
  int64_t call = 0;              // the number of collectives that this rank called on this communicator before
  int64_t number = 0;            // OpLabel::number
  int64_t shape[kMaxDims] = {};  // further dimensions are multiplied into the first
  char label[kLabelBytes] = {};  // OpLabel::operation, cut to this length
};
static_assert(sizeof(CollectiveHeader) == 120);

// A non-blocking all_gather, reduce_scatter or all_reduce, as it is passed to a backend.
struct Begun {
  CollectiveHeader header;
  at::Tensor out, in;  // the same tensor for an all_reduce
  OpLabel label;
  // The backend adds the bytes that this rank sends to ranks of other hosts. It is read when the call is complete.
  std::shared_ptr<int64_t> to_other_hosts;

  Collective collective() const { return static_cast<Collective>(header.collective); }
  bool reduces() const { return collective() != Collective::kAllGather; }
  ReduceOp op() const { return static_cast<ReduceOp>(header.reduce_op); }
  const char* name() const { return collective_name(header.collective); }
  // The tensor that consists of all ranks' parts, one after the other.
  const at::Tensor& whole() const { return collective() == Collective::kAllGather ? out : in; }
};

// tensor: the one whose shape and dtype must be the same on all ranks; null for a barrier and a split. reduce_op and
// root: -1 for collectives that have none.
CollectiveHeader make_header(Collective collective, int64_t call, const at::Tensor* tensor, int reduce_op, int root,
                             OpLabel label);
// "ranks disagree in all_gather: shape is [6] on rank 0, [5] on rank 1", for the headers of a communicator's ranks in
// rank order; empty if they are all the same. counted: OpLabel::counted of the call.
std::string describe_disagreement(const Communicator& comm, const std::vector<CollectiveHeader>& headers,
                                  std::string_view counted);
// Raises Error(kMismatch) if the headers differ, the same on every rank.
void require_same_headers(const Communicator& comm, const std::vector<CollectiveHeader>& headers, OpLabel label);

}  // namespace annulus::comm_internal
