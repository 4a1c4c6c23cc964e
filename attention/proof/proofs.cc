// Makes and caches ranks' proofs; see proofs.h.
#include "attention/proof/proofs.h"

#include <string>

#include "memory/caches.h"

namespace annulus {
namespace {

NamedCache<RankShare>& shares() {
  // It is never destroyed, because a thread that plans ahead may use it until the process ends.
  static auto& cache = *new NamedCache<RankShare>("proofs");
  return cache;
}

int64_t share_bytes(const RankShare& share) {
  return static_cast<int64_t>(sizeof share + (share.sent.size() + share.received.size()) * sizeof(PairDigest));
}

}  // namespace

RankShare prove_share(const Program& program, const Pattern& pattern) {
  return {verify_rank(program, pattern), sent_digests(program), received_digests(program),
          std::make_shared<std::atomic<bool>>(false)};
}

std::shared_ptr<const RankShare> cached_share(const PlanRequest& request, const Program& program) {
  return shares().get(
      request.text() + ", rank " + std::to_string(program.rank),
      [&] { return prove_share(program, *cached_pattern(request)); }, share_bytes);
}

void plan_and_prove_ahead(const PlanRequest& request, int rank) {
  plan_ahead(request, rank, [request](const Program& program) { cached_share(request, program); });
}

}  // namespace annulus
