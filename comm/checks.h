// Which tensors and ranks every backend accepts, and the wording of errors. Internal to comm/.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "comm/communicator.h"
#include "common/error.h"

namespace annulus::comm_internal {

// "attention forward, hop 2"
std::string where(OpLabel label);
// "rank 3", "ranks 0-2", "ranks 0,2-4". Ascending input.
std::string describe_ranks(const std::vector<int>& ranks);
// The same of ranks of a communicator, by their numbers in the job: "ranks 1,3 of the job" where these are others.
std::string describe_ranks(const Communicator& comm, std::vector<int> ranks);
// "rank 1 is stopped (SIGSTOP or a debugger; host vm)"
std::string describe_stopped(const std::vector<int>& ranks, const std::string& host);
// "fp32", "bf16", ...
std::string dtype_name(at::ScalarType dtype);
// "0.5 s"
std::string describe_seconds(double seconds);

[[noreturn]] void throw_comm(OpLabel label, const std::string& message);
[[noreturn]] void throw_mismatch(OpLabel label, const std::string& message);

// Raised by an operation of a communicator that was dead before it, or that died of another rank's failure: its cause
// has been raised elsewhere and says more.
class DeadCommunicator final : public Error {
 public:
  DeadCommunicator(OpLabel label, const std::string& message);
};

// Refuse (Error(kPlan)) what a backend cannot carry: undefined, wrong device (an index counts where `device` has one),
// not contiguous, no such peer.
void check_tensor(const at::Tensor& tensor, at::Device device, std::string_view backend, const char* role,
                  OpLabel label);
void check_messages(const std::vector<Message>& sends, const std::vector<Message>& receives, int size,
                    at::Device device, std::string_view backend, OpLabel label);
// fp32, fp64 and int64 only, and bf16 where it is said.
void check_reducible(const at::Tensor& tensor, std::string_view backend, bool bf16, OpLabel label);
// out is [size, ...in]; roles are named in the error.
void check_gather_shapes(const at::Tensor& big, const char* big_role, const at::Tensor& small, const char* small_role,
                         int size, OpLabel label);
// small shares no memory with big, or is big[rank].
void check_overlap(const at::Tensor& big, const char* big_role, const at::Tensor& small, const char* small_role,
                   int rank, OpLabel label);
void check_root(int root, int size, OpLabel label);

// "is A on ranks 0-2, B on rank 3": values in rank order, long ones cut to where they differ.
std::string describe_difference(const Communicator& comm, const std::vector<std::string>& values);

}  // namespace annulus::comm_internal
