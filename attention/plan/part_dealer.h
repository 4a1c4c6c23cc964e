// Deals the positions of a sequence whose parts need nothing of each other, such as packed documents, to ranks that are
// to have as many tokens and about as many pairs each. Used by balanced_layout (balance.h), which compares what the
// ways here give. Functions without state, thread safe; equal arguments give equal results on every rank.
//
// Whole parts send nothing. Where a part is cut, each rank needs its keys before the rank's last query in it, as in
// causal documents. So the part that has the most work is cut from its end, where a token has the most: a rank takes as
// much of the end as its share of the work allows, and fills up with tokens that have little work, namely whole small
// parts and the beginning of the same part, which costs no rows, or a piece of the next small part. What is left of
// long parts becomes short enough to be taken whole.
#pragma once

#include <cstdint>
#include <vector>

namespace annulus {

struct Stretch {  // of the sequence, [begin, end)
  int64_t begin = 0, end = 0;
};
using Stretches = std::vector<Stretch>;

// Appends a stretch, joined to the last one if it continues it.
void append(Stretches& pieces, Stretch piece);

// Returns several ways to deal `parts`, which cover the sequence, each with the stretches of every rank. `before` is as
// in PositionWork. A rank has as many tokens as in the layout contiguous. Few of the ways are even if parts are large:
// the caller looks. The time is bounded by counted steps.
std::vector<std::vector<Stretches>> deal_parts(const std::vector<int64_t>& before, const Stretches& parts, int ranks);

}  // namespace annulus
