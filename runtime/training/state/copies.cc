// See copies.h.
#include "runtime/training/state/copies.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "comm/hosts.h"
#include "common/checksum.h"
#include "common/error.h"
#include "common/text.h"
#include "common/trace/recorder.h"
#include "runtime/config/config.h"
#include "runtime/training/state/model_state.h"

namespace annulus {
namespace {

// The number of elements that are brought to the host at a time.
constexpr int64_t kPiece = int64_t{1} << 22;

void add_bits(Hash64& hash, const at::Tensor& of) {
  const at::Tensor all = of.detach().view({-1});
  for (int64_t at = 0; at < all.numel(); at += kPiece) {
    const at::Tensor piece = all.narrow(0, at, std::min(kPiece, all.numel() - at)).to(at::kCPU);
    hash.update(piece.const_data_ptr(), piece.nbytes());
  }
}

}  // namespace

std::vector<HeldAlike> ModelState::digests() {
  std::vector<HeldAlike> held;
  if (traits_.sharding.level > 2) return held;
  const bool whole = traits_.sharding.level == 0;
  for (size_t unit = 0; unit < updated_.size(); ++unit) {
    need(unit);
    const std::string& name = parameters_.units()[unit].name;
    const at::Tensor leaves = parameters_.values(unit).tensor(), values = updated_[unit].values;
    Hash64 hash;
    add_bits(hash, leaves);
    if (whole && values.defined() && !values.is_alias_of(leaves)) add_bits(hash, values);
    held.push_back({"the weights of " + name, hash.take()});
    if (!whole) continue;
    add_bits(hash, updated_[unit].gradients);
    held.push_back({"the gradients of " + name, hash.take()});
  }
  return held;
}

std::optional<UnequalCopies> find_unequal(const std::vector<std::string>& parts,
                                          const std::vector<std::vector<uint64_t>>& digests) {
  std::optional<UnequalCopies> found;
  for (size_t part = 0; part < parts.size(); ++part) {
    std::map<uint64_t, std::vector<int>> groups;
    for (size_t rank = 0; rank < digests.size(); ++rank) groups[digests[rank][part]].push_back(static_cast<int>(rank));
    if (groups.size() < 2) continue;
    if (found) {
      ++found->parts;
      continue;
    }
    found = {.what = parts[part], .ranks = {}};
    const auto smaller = [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); };
    const auto largest = std::max_element(groups.begin(), groups.end(), smaller);
    found->majority = std::count_if(groups.begin(), groups.end(), [&](const auto& group) {
                        return group.second.size() == largest->second.size();
                      }) == 1;
    for (int rank = 0; rank < static_cast<int>(digests.size()); ++rank) {
      const bool right = digests[static_cast<size_t>(rank)][part] == largest->first;
      if (!found->majority || !right) found->ranks.push_back(rank);
    }
  }
  return found;
}

void require_equal_copies(Communicator& comm, const std::vector<HeldAlike>& held, int64_t step) {
  if (comm.size() == 1 || held.empty()) return;
  const OpLabel label{"comparing the copies of the state", step, "step"};
  const auto parts = static_cast<int64_t>(held.size());
  at::Tensor own = at::empty({parts}, at::kLong), all = at::empty({comm.size(), parts}, at::kLong);
  std::vector<std::string> names;
  for (int64_t part = 0; part < parts; ++part) {
    names.push_back(held[static_cast<size_t>(part)].what);
    own.mutable_data_ptr<int64_t>()[part] = static_cast<int64_t>(held[static_cast<size_t>(part)].digest);
  }
  comm.host().all_gather(all, own, label);
  std::vector<std::vector<uint64_t>> digests;
  const int64_t* from = all.const_data_ptr<int64_t>();
  for (int rank = 0; rank < comm.size(); ++rank, from += parts) digests.emplace_back(from, from + parts);
  const std::optional<UnequalCopies> unequal = find_unequal(names, digests);
  if (!unequal) return;
  const std::vector<std::string> hosts = all_gather_text(comm, host_name(), label);
  std::vector<std::string> ranks;
  for (const int rank : unequal->ranks) {
    ranks.push_back("rank " + std::to_string(comm.in_job(rank)) + " (host " + hosts[static_cast<size_t>(rank)] + ")");
  }
  const std::string more = unequal->parts > 1 ? " and of " + counted(unequal->parts - 1, "other part") : "";
  throw Error(ErrorKind::kResource, "train",
              "step " + with_commas(step) + ": " + unequal->what + more +
                  " should have the same bits on all ranks, but " +
                  (unequal->majority ? join(ranks, ", ") + (ranks.size() == 1 ? " holds" : " hold") +
                                           " others than the other " + counted(comm.size() - std::ssize(ranks), "rank")
                                     : join(ranks, ", ") + " hold different ones, and these copies do not tell which "
                                                           "are right") +
                  ": a memory or a processor has changed them. Test those hosts, and resume without them");
}

void compare_copies(const Config& config, ModelState& state, Communicator& world, int64_t step) {
  const auto due = [&](int64_t every) { return every > 0 && step % every == 0; };
  if (config.run.compare_copies == 0 || world.size() == 1) return;
  if (!due(config.run.compare_copies) && !due(config.checkpoint.every) && step != config.run.steps) return;
  const TraceSpan span(TraceKind::kCompute, "compare copies");
  require_equal_copies(world, state.digests(), step);
}

}  // namespace annulus
