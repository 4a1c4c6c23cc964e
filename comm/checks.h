// What every backend checks and says alike: which tensors are accepted, the header on which ranks agree before a
// collective, and the wording of errors. Internal to comm/.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "common/error.h"

namespace annulus::comm_internal {

// "attention forward, step 2"
std::string where(OpLabel label);
// "rank 3", "ranks 0-2", "ranks 0,2-4". Ascending input.
std::string describe_ranks(const std::vector<int>& ranks);
// "fp32", "bf16", ...
std::string dtype_name(at::ScalarType dtype);
std::string describe_shape(at::IntArrayRef shape);
// "0.5 s"
std::string describe_seconds(double seconds);

[[noreturn]] void throw_comm(OpLabel label, const std::string& message);
[[noreturn]] void throw_mismatch(OpLabel label, const std::string& message);

// Refuse (Error(kPlan)) what a backend cannot carry: undefined, wrong device, not contiguous, unknown dtype, no such
// peer.
void check_tensor(const at::Tensor& tensor, at::DeviceType device, std::string_view backend, const char* role,
                  OpLabel label);
void check_messages(const std::vector<Message>& sends, const std::vector<Message>& receives, int size,
                    at::DeviceType device, std::string_view backend, OpLabel label);
// fp32, fp64 and int64 only.
void check_reducible(const at::Tensor& tensor, std::string_view backend, OpLabel label);
// out is [size, ...in]; roles are named in the error.
void check_gather_shapes(const at::Tensor& big, const char* big_role, const at::Tensor& small, const char* small_role,
                         int size, OpLabel label);
void check_root(int root, int size, OpLabel label);

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
  int64_t call = 0;  // collectives of this communicator so far
  int64_t step = 0;
  int64_t shape[kMaxDims] = {};  // more dimensions are folded into the first
  char label[kLabelBytes] = {};  // cut off
};
static_assert(sizeof(CollectiveHeader) == 120);

// tensor may be null (barrier, split).
CollectiveHeader make_header(Collective collective, int64_t call, const at::Tensor* tensor, int reduce_op, int root,
                             OpLabel label);
// Error(kMismatch), the same on every rank, when headers (in rank order) differ.
void require_same_headers(const std::vector<CollectiveHeader>& headers, OpLabel label);

// "is A on ranks 0-2, B on rank 3": values in rank order.
std::string describe_difference(const std::vector<std::string>& values);

}  // namespace annulus::comm_internal
