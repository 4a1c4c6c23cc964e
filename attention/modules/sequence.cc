// See sequence.h.
#include "attention/modules/sequence.h"

#include <numeric>
#include <string>
#include <utility>

#include "attention/plan/layout.h"
#include "common/error.h"
#include "common/text.h"

namespace annulus {
namespace {

// Bits of the third number that ranks exchange; those above kLseGradient are MiB of free memory.
constexpr int64_t kKeepLast = 1, kLseGradient = 2, kMebibyte = 4;

std::string list(const std::vector<int64_t>& lengths) {
  std::string text;
  for (const int64_t n : lengths) text += (text.empty() ? "" : ", ") + std::to_string(n);
  return text;
}

}  // namespace

SequenceParts agree_on_call(const std::function<CallTerms()>& find, Communicator& comm, OpLabel label) {
  const auto terms = [&]() -> Terms {
    CallTerms found = find();
    return {std::move(found.alike),
            {found.queries, found.keys,
             (found.keep_last ? kKeepLast : 0) | (found.lse_gradient ? kLseGradient : 0) |
                 (found.free_bytes >> 20) * kMebibyte}};
  };
  SequenceParts parts;
  for (const auto& [queries, keys, flags] : agree_together(comm, label, terms)) {
    parts.queries.push_back(queries);
    parts.keys.push_back(keys);
    parts.keep_last = parts.keep_last && (flags & kKeepLast) != 0;
    parts.lse_gradient = parts.lse_gradient || (flags & kLseGradient) != 0;
    const int64_t free = flags / kMebibyte << 20;
    if (free > 0 && (parts.free_bytes == 0 || free < parts.free_bytes)) parts.free_bytes = free;
  }
  return parts;
}

void place_sequence(PlanRequest& request, const SequenceParts& parts) {
  const int ranks = static_cast<int>(parts.queries.size());
  request.ranks = ranks;
  request.keep_last = parts.keep_last;
  request.shape.q_len = std::accumulate(parts.queries.begin(), parts.queries.end(), int64_t{0});
  request.shape.k_len = std::accumulate(parts.keys.begin(), parts.keys.end(), int64_t{0});
  request.uneven_lengths.clear();
  const std::vector<int64_t> queries = layout_counts(request.layout, request.shape.q_len, ranks);
  const std::vector<int64_t> keys = layout_counts(request.layout, request.shape.k_len, ranks);
  if (parts.queries == queries && parts.keys == keys) return;
  if (request.layout == LayoutKind::kContiguous && parts.queries == parts.keys) {
    request.uneven_lengths = parts.queries;
    return;
  }
  const bool of_queries = parts.queries != queries;
  const std::string layout(to_string(request.layout));
  throw Error(
      ErrorKind::kPlan, "plan",
      "the ranks hold " + list(of_queries ? parts.queries : parts.keys) + " positions of the " +
          (of_queries ? "queries" : "keys") + ", but the layout " + layout + " deals these " +
          counted(of_queries ? request.shape.q_len : request.shape.k_len, "position") + " as " +
          list(of_queries ? queries : keys) +
          "; only the layout contiguous takes parts of other lengths, which must be the same for queries and keys");
}

}  // namespace annulus
