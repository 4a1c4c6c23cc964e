// Exchanges and compares the ranks' proofs; see prove.h.
#include "attention/execution/prove.h"

#include <ATen/ops/empty.h>

#include <string>
#include <vector>

#include "attention/pattern/pattern.h"
#include "comm/agreement.h"
#include "common/environment.h"
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
std::vector<PairDigest> hear(const std::vector<PairDigest>& sent, Communicator& comm) {
  Communicator& host = comm.host();
  const int64_t ranks = host.size();
  const at::Tensor said = at::empty({ranks, kWords}, at::kLong), heard = at::empty({ranks, kWords}, at::kLong);
  for (int64_t r = 0; r < ranks; ++r)
    write(sent[static_cast<size_t>(r)], said.mutable_data_ptr<int64_t>() + kWords * r);
  std::vector<Message> sends, receives;
  for (int peer = 0; peer < host.size(); ++peer) {
    sends.push_back({said.select(0, peer), peer});
    receives.push_back({heard.select(0, peer), peer});
  }
  host.exchange(sends, receives, {"proving the plan", 0})->wait();
  std::vector<PairDigest> digests;
  for (int64_t r = 0; r < ranks; ++r) digests.push_back(read(heard.const_data_ptr<int64_t>() + kWords * r));
  return digests;
}

void require_right(const RankShare& share, const std::vector<PairDigest>& heard, const PlanRequest& request, int rank) {
  std::vector<std::string> faults = share.proof.faults;
  for (size_t peer = 0; peer < heard.size(); ++peer) {
    for (std::string& fault : compare_digests(static_cast<int>(peer), rank, heard[peer], share.received[peer])) {
      faults.push_back(std::move(fault));
    }
  }
  if (faults.empty()) return;
  const std::string more = faults.size() > 1 ? " (and " + std::to_string(faults.size() - 1) + " more)" : "";
  throw Error(ErrorKind::kInternal, "plan",
              "the plan for " + request.text() + " is wrong: " + faults[0] + more + "; please report it");
}

}  // namespace

bool proves_by_default() { return switch_from_environment("ANNULUS_PROVE", true); }

void prove_together(const RankShare& share, const PlanRequest& request, Communicator& comm) {
  if (comm.size() == 1) {
    require_right(share, share.sent, request, 0);
  } else {
    const std::vector<PairDigest> heard = hear(share.sent, comm);
    together(comm, {"proving the plan"}, [&] { require_right(share, heard, request, comm.rank()); });
  }
  *share.shown = true;
}

void prove_plan(const PlanRequest& request, Communicator& comm) {
  if (is_adaptive(request.pattern)) return;
  std::shared_ptr<const RankShare> share;
  const auto asked = agree_together(comm, {"proving the plan", 0}, [&]() -> Terms {
    share = cached_share(request, *cached_program(request, comm.rank()));
    return {{{"plan", request.text()}}, {!*share->shown}};
  });
  if (std::any_of(asked.begin(), asked.end(), [](const Terms::Numbers& asks) { return asks[0] != 0; })) {
    prove_together(*share, request, comm);
  }
}

}  // namespace annulus
