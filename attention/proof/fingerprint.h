// Fingerprints of sets of (batch row, query head, query, key). With them the verifier compares the pairs of tiles with
// those of a pattern, without enumerating them. Internal to the verifier; shares no code with the planner's
// intersection of spans.
//
// Each batch row, head, query and key has a pseudo-random weight in the field of 2^61 - 1 elements. The fingerprint of
// a multiset is the sum, over its members, of the product of the four weights. Two multisets that differ have equal
// fingerprints with probability below 2^-58 (Schwartz, JACM 27(4), 1980; Zippel, EUROSAM 1979). Prefix sums give the
// sum over a band in time proportional to rows, not pairs.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <vector>

#include "attention/pattern/span.h"
#include "attention/pattern/token_mask.h"

namespace annulus {

// An element of the field GF(2^61 - 1), in [0, 2^61 - 1).
using Fingerprint = uint64_t;

Fingerprint add(Fingerprint a, Fingerprint b);

// The weights of the query or key positions 0, ..., length - 1, and their sums along any stride. Not thread safe: the
// sums of a stride are made at their first use and take 8 bytes per position.
class PositionWeights {
 public:
  enum class Of { kQueries, kKeys };
  PositionWeights(Of which, int64_t length);

  Fingerprint at(int64_t position) const;
  // Returns the sum of the weights of a span's members, all of which must be valid positions.
  Fingerprint sum(const Span& span);
  // Returns the prefix sums along a stride: sums[i + stride] = weight(i) + sums[i], and the first `stride` sums are 0.
  const std::vector<Fingerprint>& prefix(int64_t stride);

 private:
  Of which_;
  int64_t length_;
  std::map<int64_t, std::vector<Fingerprint>> prefixes_;  // by stride
};

// The fingerprints of tiles and slices. Not thread safe, like PositionWeights.
class PairWeights {
 public:
  PairWeights(int64_t queries, int64_t keys);

  // Returns the fingerprint of a tile or slice: of all pairs of queries x keys within the band that the mask shows, if
  // there is one, for each batch row and head.
  Fingerprint of(const Span& batch, const Span& heads, const Span& queries, const Span& keys, const Band& band,
                 const MaskPlane* mask = nullptr);

  // Returns the fingerprint of the slice's pairs whose query is in one of `owned`, and adds their number to `*pairs`.
  // `masks` are those to which the slice refers.
  Fingerprint of_owned(const Slice& slice, const MaskPlanes& masks, const std::vector<Span>& owned, int64_t* pairs);

 private:
  // Returns the fingerprint of batch rows x heads, cached because a plan has few distinct ones.
  Fingerprint product(const Span& batch, const Span& heads);

  PositionWeights queries_, keys_;
  std::map<std::array<int64_t, 6>, Fingerprint> products_;
};

}  // namespace annulus
