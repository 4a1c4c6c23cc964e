// Layout: which rank owns which positions of a sequence, and in which order it stores them. Queries and keys each have
// one. Used by the planner, the verifier, and by whoever scatters or gathers a sequence (attend, the trainer).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "attention/pattern/span.h"

namespace annulus {

enum class LayoutKind { kContiguous, kZigzag, kStriped };

// "contiguous", "zigzag", "striped", in the order of LayoutKind. parse raises Error(kUsage) naming the nearest; `where`
// as in parse_pattern.
const std::vector<std::string>& layout_names();
std::string_view to_string(LayoutKind kind);
LayoutKind parse_layout(std::string_view name, std::string_view where);

// Rank r stores the positions of spans[r] one after the other: row i of its tensors is the i-th of them. Together the
// ranks' spans hold every position of [0, length) exactly once.
struct Layout {
  int64_t length = 0;
  std::vector<std::vector<Span>> spans;

  int ranks() const { return static_cast<int>(spans.size()); }
  int64_t count(int rank) const;
  // All positions of a rank in storage order.
  std::vector<int64_t> positions(int rank) const;
};

// Any length over any number of ranks, also fewer positions than ranks. Chunk i of c is [floor(i S/c), floor((i+1)
// S/c)):
//   contiguous  rank r owns chunk r of P
//   zigzag      rank r owns chunks r and 2P-1-r of 2P: every rank has the same share of a causal triangle
//   striped     rank r owns positions r, r + P, r + 2P, ...
Layout make_layout(LayoutKind kind, int64_t length, int ranks);

// Lengths of each rank's contiguous part, in rank order; any values that add up to the sequence. Error(kPlan)
// otherwise.
Layout make_uneven_layout(const std::vector<int64_t>& lengths, int64_t length);

// The rule `even = true`: every rank has the same share (zigzag: length a multiple of 2P; otherwise of P). Raises
// Error(kPlan) naming the nearest valid lengths and the rank counts that would fit.
void require_even(LayoutKind kind, int64_t length, int ranks, std::string_view what);

}  // namespace annulus
