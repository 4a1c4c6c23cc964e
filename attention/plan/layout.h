// Layout: which rank owns which positions of a sequence, and in which order it stores them. Queries and keys have one
// layout each. Used by the planner, the verifier, and the code that scatters or gathers a sequence (modules,
// python/ops, training, attend through attention/execution).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "attention/pattern/span.h"

namespace annulus {

enum class LayoutKind { kContiguous, kZigzag, kStriped };

// "contiguous", "zigzag", "striped", in the order of LayoutKind. parse_layout raises Error(kUsage) for another name and
// suggests the nearest; `where` is as in parse_pattern.
const std::vector<std::string>& layout_names();
std::string_view to_string(LayoutKind kind);
LayoutKind parse_layout(std::string_view name, std::string_view where);

// Rank r stores the positions of spans[r] one after the other, and row i of its tensors is the i-th of them. The spans
// of all ranks together contain every position of [0, length) exactly once.
struct Layout {
  int64_t length = 0;
  std::vector<std::vector<Span>> spans;

  int ranks() const { return static_cast<int>(spans.size()); }
  // The number of positions of a rank.
  int64_t count(int rank) const;
  // All positions of a rank in storage order.
  std::vector<int64_t> positions(int rank) const;
};

// Divides `length` positions S among P ranks; there may be fewer positions than ranks. Chunk i of c is
// [floor(i S/c), floor((i+1) S/c)):
//   contiguous  rank r owns chunk r of P
//   zigzag      rank r owns chunks r and 2P-1-r of 2P; if 2P divides S, all shares of a causal triangle are equal
//   striped     rank r owns positions r, r + P, r + 2P, ...
// Raises Error(kPlan) if ranks < 1.
Layout make_layout(LayoutKind kind, int64_t length, int ranks);

// Gives each rank a contiguous part; `lengths` are the parts' lengths in rank order. Raises Error(kPlan) if a length is
// not in [0, length] or they do not add up to `length`.
Layout make_uneven_layout(const std::vector<int64_t>& lengths, int64_t length);

// Checks the rule `even = true`, by which every rank has the same share: the length must be a multiple of 2P for zigzag
// and of P otherwise. Raises Error(kPlan) with the nearest valid lengths and with rank counts that would fit; `what`
// names the sequence in the message.
void require_even(LayoutKind kind, int64_t length, int ranks, std::string_view what);

}  // namespace annulus
