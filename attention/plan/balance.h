// Deals the positions of a sequence to ranks so that each has as many tokens and as many counted pairs as the others:
// the layout "balanced", which sends few rows, and "per-document", even in each step of a ring. Used by query_layout
// and key_layout (plan.h), tests and benchmarks. Functions without state, thread safe; equal arguments give equal
// layouts on every rank.
//
// Laid on a circle, the positions of R ranks have an arc with exactly the tokens of the first a of them and exactly
// their part of the work, because the mean work over all arcs with so many tokens is that part and the work changes
// little from one arc to the next. The rest is an arc, too. So halving the ranks again and again cuts the circle at
// most 2 (P - 1) times, about two pieces for each rank (Goldberg and West, "Bisection of circle colorings", 1985; Alon,
// "Splitting necklaces", 1987). For a causal row this gives the sets of zigzag. Among the arcs whose work is near
// enough, that one is taken whose ends separate the fewest keys from queries that need them.
//
// A sequence of parts that need nothing of each other, such as packed documents, is also dealt part by part
// (part_dealer.h). Of all that are even enough the one that sends the fewest rows is taken.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/pattern/pattern.h"
#include "attention/plan/layout.h"

namespace annulus {

// Cuts between positions are first looked for at multiples of this number of tokens and at the borders of documents.
constexpr int64_t kBalanceChunk = 128;
// How far the ranks' pairs may be above their mean where a cut of fewer bytes can be had for it.
constexpr double kBalanceTolerance = 0.04;
// The least tokens of a piece that per-document cuts: kernels compute fewer queries in as much time.
constexpr int64_t kLeastPiece = 64;

// What a pattern asks of each position.
struct PositionWork {
  std::vector<int64_t> before;    // [Sq + 1]: pairs of the queries before each position, over all heads and batch rows
  std::vector<int64_t> crossing;  // [S + 1]: key rows that a cut before the position separates from queries that need
                                  // them, 0 at both ends; all 0 if Sq != Sk. Strided keys count as a part of their hull
};
// Time and memory: O(slices + S), and for slices with strides O(members). A mask of tokens is not read, because a rank
// may hold no more than its own part of it: its pairs count as if nothing were masked.
PositionWork position_work(const Pattern& pattern);

// Returns the layout of pattern.shape.q_len positions. Each rank has as many as in the layout contiguous, in rising
// order. Raises Error(kPlan) if ranks < 1.
Layout balanced_layout(const Pattern& pattern, int ranks);

// Returns the layout in which each part that needs nothing of others, such as a packed document, is dealt as zigzag
// deals a row, so that all ranks have as many pairs with the keys of each rank as the others: per-document sharding
// (WLB-LLM, arXiv:2503.17924). A ring's step takes as long as the rank with the most. Parts of less than 2P x
// kLeastPiece positions are dealt by halving instead, as a circle. Positions, order and errors are as in
// balanced_layout.
Layout per_document_layout(const Pattern& pattern, int ranks);

// Returns the pattern with each adaptive map replaced by one that keeps the same number of blocks, namely those nearest
// to the diagonal, so that its pairs can be counted before there are queries and keys.
PatternSpec with_nearest_blocks(PatternSpec spec, const AttentionShape& shape);

// Returns the pattern without its masks of tokens, of which ranks hold different parts.
PatternSpec without_masks(PatternSpec spec);

// Returns the pattern by which layers with these patterns are dealt together: their only one, or a union in which each
// is as often as it is among them, reduced to few members.
PatternSpec balanced_together(const std::vector<PatternSpec>& layers);

}  // namespace annulus
