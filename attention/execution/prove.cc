// Exchanges and compares the ranks' proofs; see prove.h.
#include "attention/execution/prove.h"

#include <ATen/ops/empty.h>

#include <array>
#include <string>
#include <vector>

#include "comm/agreement.h"
#include "common/error.h"
#include "common/trace/recorder.h"

namespace annulus {
namespace {

constexpr int64_t kDigestWords = 4;           // the number of 64-bit words of a PairDigest
constexpr int64_t kWords = kDigestWords + 3;  // with the fingerprints of a proof

// What a rank tells another: the digest of what it sends there, and what its tiles add up to.
struct Word {
  PairDigest digest;
  std::array<uint64_t, 3> fingerprints;
};

void write(const Word& word, int64_t* words) {
  for (const TransferDigest& d : word.digest) {
    *words++ = d.transfers;
    *words++ = static_cast<int64_t>(d.content);
  }
  for (const uint64_t f : word.fingerprints) *words++ = static_cast<int64_t>(f);
}

Word read(const int64_t* words) {
  Word word;
  for (TransferDigest& d : word.digest) {
    d.transfers = *words++;
    d.content = static_cast<uint64_t>(*words++);
  }
  for (uint64_t& f : word.fingerprints) f = static_cast<uint64_t>(*words++);
  return word;
}

// Exchanges words with all ranks and returns what each rank says to this one.
std::vector<Word> exchange_words(const RankShare& share, Communicator& comm) {
  Communicator& host = comm.host();
  const int64_t ranks = host.size();
  const at::Tensor outgoing = at::empty({ranks, kWords}, at::kLong), incoming = at::empty({ranks, kWords}, at::kLong);
  for (int64_t r = 0; r < ranks; ++r) {
    write({share.sent[static_cast<size_t>(r)], fingerprints(share.proof)},
          outgoing.mutable_data_ptr<int64_t>() + kWords * r);
  }
  std::vector<Message> sends, receives;
  for (int peer = 0; peer < host.size(); ++peer) {
    sends.push_back({outgoing.select(0, peer), peer});
    receives.push_back({incoming.select(0, peer), peer});
  }
  host.exchange(sends, receives, {"proving the plan", 0})->wait();
  std::vector<Word> all;
  for (int64_t r = 0; r < ranks; ++r) all.push_back(read(incoming.const_data_ptr<int64_t>() + kWords * r));
  return all;
}

void require_right(const RankShare& share, const std::vector<Word>& incoming, const PlanRequest& request, int rank) {
  std::vector<std::string> faults = share.proof.faults;
  std::vector<std::array<uint64_t, 3>> of_ranks;
  for (size_t peer = 0; peer < incoming.size(); ++peer) {
    of_ranks.push_back(incoming[peer].fingerprints);
    for (std::string& fault :
         compare_digests(static_cast<int>(peer), rank, incoming[peer].digest, share.received[peer])) {
      faults.push_back(std::move(fault));
    }
  }
  for (std::string& fault : compare_pairs(of_ranks)) faults.push_back(std::move(fault));
  if (faults.empty()) return;
  const std::string more = faults.size() > 1 ? " (and " + std::to_string(faults.size() - 1) + " more)" : "";
  throw Error(ErrorKind::kInternal, "plan",
              "the plan for " + request.text() + " is wrong: " + faults[0] + more + "; please report it");
}

}  // namespace

void prove_together(const RankPlan& plan, Communicator& comm) {
  const TraceSpan span(TraceKind::kPlanning, "prove together");
  const RankShare& share = plan.share();
  const PlanRequest& request = plan.program.request;
  if (comm.size() == 1) {
    require_right(share, {{share.sent[0], fingerprints(share.proof)}}, request, 0);
  } else {
    const std::vector<Word> received = exchange_words(share, comm);
    together(comm, {"proving the plan"}, [&] { require_right(share, received, request, comm.rank()); });
  }
  plan.proved = true;
}

}  // namespace annulus
