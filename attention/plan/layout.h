// Layout: which rank owns which positions of a sequence, in which storage order. Queries and keys have one layout each.
// Used by the planner, the verifier, and the code that scatters or gathers a sequence (modules, python/ops, training,
// and attend through attention/execution).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "attention/pattern/span.h"

namespace annulus {

enum class LayoutKind { kContiguous, kZigzag, kStriped, kBalanced, kPerDocument };

// "contiguous", "zigzag", "striped", "balanced", "per-document", in the order of LayoutKind. parse_layout raises
// Error(kUsage), which suggests the nearest, for another name; `where` is as in parse_pattern.
const std::vector<std::string>& layout_names();
std::string_view to_string(LayoutKind kind);
LayoutKind parse_layout(std::string_view name, std::string_view where);

// Whether positions are dealt by a pattern, as balanced and per-document are.
constexpr bool is_dealt(LayoutKind kind) { return kind == LayoutKind::kBalanced || kind == LayoutKind::kPerDocument; }

// Row i of rank r's tensors is the i-th position of the concatenation of spans[r]. The spans of all ranks together
// contain every position of [0, length) exactly once.
struct Layout {
  int64_t length = 0;
  std::vector<std::vector<Span>> spans;

  int ranks() const { return static_cast<int>(spans.size()); }
  // Returns the number of positions of a rank.
  int64_t count(int rank) const;
  // Returns all positions of a rank in storage order.
  std::vector<int64_t> positions(int rank) const;
};

// Divides S = `length` positions among P = `ranks` ranks; S may be less than P. Chunk i of c is [floor(i S/c),
// floor((i+1) S/c)):
//   contiguous  rank r owns chunk r of P
//   zigzag      rank r owns chunks r and 2P-1-r of 2P; balances causal attention exactly if 2P divides S
//   striped     rank r owns positions r, r + P, r + 2P, ...
// The others depend on the pattern and are dealt by query_layout (plan.h), which all that have a request call. Raises
// Error(kPlan) if ranks < 1, and Error(kInternal) for a layout that is dealt.
Layout make_layout(LayoutKind kind, int64_t length, int ranks);

// Returns the number of positions of each rank, which depends on nothing else in any layout; those that are dealt have
// the numbers of contiguous. Raises Error(kPlan) if ranks < 1.
std::vector<int64_t> layout_counts(LayoutKind kind, int64_t length, int ranks);

// Gives each rank a contiguous part of lengths[rank] positions. Raises Error(kPlan) if a length is not in [0, length]
// or they do not sum to `length`.
Layout make_uneven_layout(const std::vector<int64_t>& lengths, int64_t length);

// Checks that all ranks have equal shares, as `even = true` demands: the length must be a multiple of 2P for zigzag and
// of P otherwise. Raises Error(kPlan) with the nearest valid lengths and rank counts; `what` names the sequence in the
// message.
void require_even(LayoutKind kind, int64_t length, int ranks, std::string_view what);

}  // namespace annulus
