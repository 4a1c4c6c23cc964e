// See requests.h.
#include "comm/mpi/requests.h"

#include "comm/checks.h"

namespace annulus::mpi_internal {

std::string describe(const Communicator& comm, const Pending::Item& item) {
  if (item.peer < 0) return "a collective";
  return (item.is_send ? "sending " : "receiving ") + std::to_string(item.bytes) +
         (item.is_send ? " bytes to " : " bytes from ") + comm_internal::describe_ranks(comm, {item.peer});
}

std::string describe_unfinished(const Communicator& comm, const Pending& pending) {
  std::vector<int> peers;
  const Pending::Item* first = nullptr;
  for (const Pending::Item& item : pending.items) {
    if (item.done) continue;
    // A message not received says more than one not sent: its sender has not come.
    if (first == nullptr || (first->is_send && !item.is_send)) first = &item;
    if (item.peer >= 0 && !item.is_send) peers.push_back(item.peer);
  }
  if (pending.collective != nullptr) {
    std::sort(peers.begin(), peers.end());
    peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
    if (peers.empty()) return std::string(pending.collective) + ": another rank did not finish";
    return std::string(pending.collective) + ": " + comm_internal::describe_ranks(comm, peers) + " did not come";
  }
  std::string text = describe(comm, *first) + ": not done";
  const auto open =
      std::count_if(pending.items.begin(), pending.items.end(), [](const Pending::Item& item) { return !item.done; });
  if (open > 1) text += " (nor " + std::to_string(open - 1) + " more transfers)";
  return text;
}

}  // namespace annulus::mpi_internal
