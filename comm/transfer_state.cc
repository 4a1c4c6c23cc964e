// See transfer_state.h.
#include "comm/transfer_state.h"

#include <algorithm>

#include "comm/checks.h"
#include "common/text.h"

namespace annulus::comm_internal {

std::string describe(const Communicator& comm, const TransferState& transfer) {
  if (transfer.peer < 0) return "a collective";
  return (transfer.is_send ? "sending " : "receiving ") + counted(transfer.bytes, "byte") +
         (transfer.is_send ? " to " : " from ") + describe_ranks(comm, {transfer.peer});
}

std::string describe_message(int64_t bytes, int64_t number, at::ScalarType dtype, const std::string& shape) {
  return counted(bytes, "byte") + " (message " + std::to_string(number) + " between these ranks, " + dtype_name(dtype) +
         shape + ")";
}

std::string describe_mismatch(const Communicator& comm, int peer, const std::string& sent,
                              const std::string& expected) {
  return describe_ranks(comm, {peer}) + " sent " + sent + ", but " + describe_ranks(comm, {comm.rank()}) +
         " expected " + expected;
}

std::string describe_unfinished(const Communicator& comm, const std::vector<TransferState>& transfers,
                                const char* collective) {
  std::vector<int> peers;
  const TransferState* first = nullptr;
  int64_t open = 0;
  for (const TransferState& transfer : transfers) {
    if (transfer.done) continue;
    ++open;
    // Name a receive rather than a send: an unfinished receive shows that its sender has not come.
    if (first == nullptr || (first->is_send && !transfer.is_send)) first = &transfer;
    if (transfer.peer >= 0 && !transfer.is_send) peers.push_back(transfer.peer);
  }
  if (collective != nullptr) {
    std::sort(peers.begin(), peers.end());
    peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
    if (peers.empty()) return std::string(collective) + ": another rank did not finish";
    return std::string(collective) + ": " + describe_ranks(comm, peers) + " did not come";
  }
  std::string text = describe(comm, *first) + ": not done";
  if (open > 1) text += " (nor " + std::to_string(open - 1) + " more transfers)";
  return text;
}

}  // namespace annulus::comm_internal
