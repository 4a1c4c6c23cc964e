// Exchanges and compares the ranks' proofs; see prove.h.
#include "attention/execution/prove.h"

#include <ATen/ops/empty.h>

#include <string>
#include <vector>

#include "comm/agreement.h"
#include "common/error.h"

namespace annulus {
namespace {

constexpr int64_t kWords = 4;  // the number of 64-bit words of a PairDigest

void write(const PairDigest& digest, int64_t* words) {
  for (const TransferDigest& d : digest) {
    *words++ = d.transfers;
    *words++ = static_cast<int64_t>(d.content);
  }
}

PairDigest read(const int64_t* words) {
  PairDigest digest;
  for (TransferDigest& d : digest) {
    d.transfers = *words++;
    d.content = static_cast<uint64_t>(*words++);
  }
  return digest;
}

// Exchanges digests with all ranks and returns what each rank says that it sends to this one.
std::vector<PairDigest> exchange_digests(const std::vector<PairDigest>& sent, Communicator& comm) {
  Communicator& host = comm.host();
  const int64_t ranks = host.size();
  const at::Tensor outgoing = at::empty({ranks, kWords}, at::kLong), incoming = at::empty({ranks, kWords}, at::kLong);
  for (int64_t r = 0; r < ranks; ++r)
    write(sent[static_cast<size_t>(r)], outgoing.mutable_data_ptr<int64_t>() + kWords * r);
  std::vector<Message> sends, receives;
  for (int peer = 0; peer < host.size(); ++peer) {
    sends.push_back({outgoing.select(0, peer), peer});
    receives.push_back({incoming.select(0, peer), peer});
  }
  host.exchange(sends, receives, {"proving the plan", 0})->wait();
  std::vector<PairDigest> digests;
  for (int64_t r = 0; r < ranks; ++r) digests.push_back(read(incoming.const_data_ptr<int64_t>() + kWords * r));
  return digests;
}

void require_right(const RankShare& share, const std::vector<PairDigest>& incoming, const PlanRequest& request,
                   int rank) {
  std::vector<std::string> faults = share.proof.faults;
  for (size_t peer = 0; peer < incoming.size(); ++peer) {
    for (std::string& fault : compare_digests(static_cast<int>(peer), rank, incoming[peer], share.received[peer])) {
      faults.push_back(std::move(fault));
    }
  }
  if (faults.empty()) return;
  const std::string more = faults.size() > 1 ? " (and " + std::to_string(faults.size() - 1) + " more)" : "";
  throw Error(ErrorKind::kInternal, "plan",
              "the plan for " + request.text() + " is wrong: " + faults[0] + more + "; please report it");
}

}  // namespace

void prove_together(const RankPlan& plan, Communicator& comm) {
  const RankShare& share = plan.share();
  const PlanRequest& request = plan.program.request;
  if (comm.size() == 1) {
    require_right(share, share.sent, request, 0);
  } else {
    const std::vector<PairDigest> received = exchange_digests(share.sent, comm);
    together(comm, {"proving the plan"}, [&] { require_right(share, received, request, comm.rank()); });
  }
  plan.proved = true;
}

}  // namespace annulus
