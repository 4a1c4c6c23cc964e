// See checks.h.
#include "comm/checks.h"

#include <algorithm>

#include "common/text.h"
#include "memory/releasable.h"

namespace annulus::comm_internal {
namespace {

// The first index at which the texts differ.
size_t first_difference(const std::vector<std::string>& texts) {
  for (size_t i = 0;; ++i) {
    for (const std::string& text : texts) {
      if (i >= text.size() || text[i] != texts[0][i]) return i;
    }
  }
}

// Cuts a long text to a part that begins shortly before `from`.
std::string excerpt(const std::string& text, size_t from) {
  constexpr size_t kMost = 160, kBefore = 40;
  if (text.size() <= kMost) return text;
  const size_t begin = from <= kBefore ? 0 : std::min(from - kBefore, text.size() - kMost);
  return (begin > 0 ? "..." : "") + text.substr(begin, kMost) + (begin + kMost < text.size() ? "..." : "");
}

}  // namespace

std::string where(OpLabel label) {
  std::string text(label.operation.empty() ? "unnamed operation" : label.operation);
  if (label.number == 0 && label.counted == OpLabel().counted) return text;
  return text + ", " + std::string(label.counted) + " " + std::to_string(label.number);
}

std::string describe_ranks(const std::vector<int>& ranks) {
  std::string out = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size();) {
    size_t j = i;
    while (j + 1 < ranks.size() && ranks[j + 1] == ranks[j] + 1) ++j;
    if (i > 0) out += ",";
    out += std::to_string(ranks[i]);
    if (j > i) out += "-" + std::to_string(ranks[j]);
    i = j + 1;
  }
  return out;
}

std::string describe_ranks(const Communicator& comm, std::vector<int> ranks) {
  bool others = false;
  for (int rank = 0; rank < comm.size(); ++rank) others = others || comm.in_job(rank) != rank;
  for (int& rank : ranks) rank = comm.in_job(rank);
  std::sort(ranks.begin(), ranks.end());
  return describe_ranks(ranks) + (others ? " of the job" : "");
}

std::string describe_stopped(const std::vector<int>& ranks, const std::string& host) {
  return describe_ranks(ranks) + (ranks.size() == 1 ? " is" : " are") + " stopped (SIGSTOP or a debugger; host " +
         host + ")";
}

std::string dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "fp32";
    case at::kDouble:
      return "fp64";
    case at::kBFloat16:
      return "bf16";
    case at::kHalf:
      return "fp16";
    case at::kLong:
      return "int64";
    case at::kInt:
      return "int32";
    case at::kByte:
      return "uint8";
    default:
      return c10::toString(dtype);
  }
}

std::string missed_deadline(const std::string& what, Seconds timeout) {
  return what + " within " + significant(timeout.count(), 3) + " s";
}

void throw_comm(OpLabel label, const std::string& message) {
  throw Error(ErrorKind::kComm, "comm", where(label) + ": " + message);
}

void throw_mismatch(OpLabel label, const std::string& message) {
  throw Error(ErrorKind::kMismatch, "comm", where(label) + ": " + message);
}

DeadCommunicator::DeadCommunicator(OpLabel label, const std::string& message)
    : Error(ErrorKind::kComm, "comm", where(label) + ": " + message) {}

void check_tensor(const at::Tensor& tensor, at::Device device, std::string_view backend, const char* role,
                  OpLabel label) {
  const auto refuse = [&](const std::string& why) {
    throw Error(ErrorKind::kPlan, "comm",
                where(label) + ": the " + role + " " + why + " (backend " + std::string(backend) + ")");
  };
  if (!tensor.defined()) refuse("is undefined: expected a tensor");
  if (tensor.layout() != at::kStrided) refuse("is sparse: expected a dense tensor");
  if (tensor.device().type() != device.type()) {
    refuse("is on " + tensor.device().str() + ": expected a tensor on " + c10::DeviceTypeName(device.type(), true) +
           "; move it or use the backend of its device");
  }
  if (device.has_index() && tensor.device() != device) {
    refuse("is on " + tensor.device().str() + ": move it to the device that this rank communicates from, " +
           device.str());
  }
  if (!tensor.is_contiguous()) {
    refuse("of shape " + list_text(tensor.sizes()) + " is not contiguous: pass tensor.contiguous()");
  }
  if (tensor.is_neg() || tensor.is_conj()) refuse("is a lazily negated or conjugated view: resolve it first");
}

void check_messages(const std::vector<Message>& sends, const std::vector<Message>& receives, int size,
                    at::Device device, std::string_view backend, OpLabel label) {
  const auto check = [&](const Message& message, const char* role) {
    check_tensor(message.tensor, device, backend, role, label);
    if (message.peer < 0 || message.peer >= size) {
      throw Error(ErrorKind::kPlan, "comm",
                  where(label) + ": the " + role + " names peer " + std::to_string(message.peer) +
                      ": expected a rank of this communicator, from 0 to " + std::to_string(size - 1));
    }
  };
  const auto refuse = [&](const std::string& why) { throw Error(ErrorKind::kPlan, "comm", where(label) + ": " + why); };
  for (const Message& message : sends) {
    check(message, "send buffer");
    if (!has_memory(message.tensor)) refuse("the send buffer has no memory: nothing was received into it");
  }
  for (const Message& message : receives) {
    check(message, "receive buffer");
    if (!has_memory(message.tensor) && message.tensor.storage().nbytes() != message.tensor.nbytes()) {
      refuse("the receive buffer is part of a tensor without memory: receive the whole tensor");
    }
  }
}

void check_reducible(const at::Tensor& tensor, std::string_view backend, bool bf16, OpLabel label) {
  const at::ScalarType dtype = tensor.scalar_type();
  if (dtype == at::kFloat || dtype == at::kDouble || dtype == at::kLong) return;
  if (bf16 && dtype == at::kBFloat16) return;
  throw Error(ErrorKind::kPlan, "comm",
              where(label) + ": cannot reduce " + dtype_name(dtype) + " (backend " + std::string(backend) +
                  "): this reduction takes fp32, fp64" + (bf16 ? ", bf16" : "") +
                  " and int64; convert the tensor first");
}

void check_gather_shapes(const at::Tensor& big, const char* big_role, const at::Tensor& small, const char* small_role,
                         int size, OpLabel label) {
  std::vector<int64_t> expected{size};
  expected.insert(expected.end(), small.sizes().begin(), small.sizes().end());
  if (big.sizes() == at::IntArrayRef(expected) && big.scalar_type() == small.scalar_type()) return;
  throw Error(ErrorKind::kPlan, "comm",
              where(label) + ": the " + big_role + " is " + dtype_name(big.scalar_type()) + " " +
                  list_text(big.sizes()) + ", expected " + dtype_name(small.scalar_type()) + " " + list_text(expected) +
                  ": [ranks, ..." + small_role + ".shape]");
}

void check_overlap(const at::Tensor& big, const char* big_role, const at::Tensor& small, const char* small_role,
                   int rank, OpLabel label) {
  if (small.nbytes() == 0) return;
  const auto* from = static_cast<const char*>(big.const_data_ptr());
  const auto* piece = static_cast<const char*>(small.const_data_ptr());
  if (piece + small.nbytes() <= from || from + big.nbytes() <= piece) return;
  if (piece == from + static_cast<size_t>(rank) * small.nbytes()) return;
  throw Error(ErrorKind::kPlan, "comm",
              where(label) + ": the " + small_role + " and the " + big_role + " share memory, and the " + small_role +
                  " is not " + big_role + "[" + std::to_string(rank) +
                  "], this rank's part: use that part or separate memory");
}

void check_root(int root, int size, OpLabel label) {
  if (root >= 0 && root < size) return;
  throw Error(
      ErrorKind::kPlan, "comm",
      where(label) + ": root " + std::to_string(root) + ": expected a rank from 0 to " + std::to_string(size - 1));
}

std::string describe_difference(const Communicator& comm, const std::vector<std::string>& values) {
  constexpr size_t kMostShown = 4;
  std::vector<std::string> distinct;
  std::vector<std::vector<int>> ranks;  // of each
  for (size_t r = 0; r < values.size(); ++r) {
    const auto found = std::find(distinct.begin(), distinct.end(), values[r]);
    const auto which = static_cast<size_t>(found - distinct.begin());
    if (found == distinct.end()) {
      distinct.push_back(values[r]);
      ranks.emplace_back();
    }
    ranks[which].push_back(static_cast<int>(r));
  }
  const size_t from = first_difference(distinct), shown = std::min(distinct.size(), kMostShown);
  std::string out = "is ";
  for (size_t i = 0; i < shown; ++i) {
    out += (i > 0 ? ", " : "") + excerpt(distinct[i], from) + " on " + describe_ranks(comm, ranks[i]);
  }
  if (shown == distinct.size()) return out;
  std::vector<int> others;
  for (size_t i = shown; i < ranks.size(); ++i) others.insert(others.end(), ranks[i].begin(), ranks[i].end());
  return out + " and " + std::to_string(distinct.size() - shown) + " more values on " + describe_ranks(comm, others);
}

}  // namespace annulus::comm_internal
