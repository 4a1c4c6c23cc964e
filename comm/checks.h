// Checks of the tensors and ranks given to any backend, and the wording of errors. Internal to comm/. Thread safety:
// functions without state.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "comm/communicator.h"
#include "common/error.h"

namespace annulus::comm_internal {

// "attention forward, hop 2"
std::string where(OpLabel label);
// "rank 3", "ranks 0-2", "ranks 0,2-4". The ranks must be in ascending order.
std::string describe_ranks(const std::vector<int>& ranks);
// The same for ranks of a communicator, by their numbers in the job: "ranks 1,3 of the job" if the communicator numbers
// its ranks differently.
std::string describe_ranks(const Communicator& comm, std::vector<int> ranks);
// "rank 1 is stopped (SIGSTOP or a debugger; host vm)"
std::string describe_stopped(const std::vector<int>& ranks, const std::string& host);
// "fp32", "bf16", ...
std::string dtype_name(at::ScalarType dtype);
// What every error of a missed deadline says: "ranks 0-2 did not come within 0.5 s" of "ranks 0-2 did not come".
std::string missed_deadline(const std::string& what, Seconds timeout);

[[noreturn]] void throw_comm(OpLabel label, const std::string& message);
[[noreturn]] void throw_mismatch(OpLabel label, const std::string& message);

// Raised by an operation if the communicator was already dead or died because another rank failed. The cause has been
// raised elsewhere, with more details.
class DeadCommunicator final : public Error {
 public:
  DeadCommunicator(OpLabel label, const std::string& message);
};

// These raise Error(kPlan) for what a backend cannot carry: a tensor that is undefined, not dense, on another device
// (the index counts if `device` has one), not contiguous, or a lazily negated or conjugated view; a peer out of range.
void check_tensor(const at::Tensor& tensor, at::Device device, std::string_view backend, const char* role,
                  OpLabel label);
void check_messages(const std::vector<Message>& sends, const std::vector<Message>& receives, int size,
                    at::Device device, std::string_view backend, OpLabel label);
// Allows fp32, fp64 and int64, and with `bf16` also bf16.
void check_reducible(const at::Tensor& tensor, std::string_view backend, bool bf16, OpLabel label);
// Requires that big has the shape [size, ...small.shape] and the dtype of small. The error names both by their roles.
void check_gather_shapes(const at::Tensor& big, const char* big_role, const at::Tensor& small, const char* small_role,
                         int size, OpLabel label);
// Requires that small either shares no memory with big or is big[rank].
void check_overlap(const at::Tensor& big, const char* big_role, const at::Tensor& small, const char* small_role,
                   int rank, OpLabel label);
void check_root(int root, int size, OpLabel label);

// "is A on ranks 0-2, B on rank 3". `values` are in rank order; long ones are cut to the part where they differ.
std::string describe_difference(const Communicator& comm, const std::vector<std::string>& values);

}  // namespace annulus::comm_internal
