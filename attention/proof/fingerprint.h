// Fingerprints of sets of (batch row, query head, query, key). With them the verifier compares what tiles compute with
// what a pattern counts, without enumerating pairs. Internal to the verifier; the file shares no code with the
// planner's intersection of spans.
//
// Each batch row, head, query and key has a pseudo-random weight in the field of 2^61 - 1 elements. The fingerprint of
// a multiset is the sum, over its members, of the product of the four weights. Two multisets that differ have equal
// fingerprints with probability below 2^-58 (Schwartz, JACM 27(4), 1980; Zippel, EUROSAM 1979). Bands over arithmetic
// progressions are summed with prefix sums, so the work grows with rows, not with pairs.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <vector>

#include "attention/pattern/span.h"

namespace annulus {

// An element of the field, in [0, 2^61 - 1).
using Fingerprint = uint64_t;

Fingerprint add(Fingerprint a, Fingerprint b);

// The weights of the positions 0, ..., length - 1 of queries or of keys, and their sums along any stride. Not thread
// safe: the sums of a stride are made at their first use and take 8 bytes for each position.
class PositionWeights {
 public:
  enum class Of { kQueries, kKeys };
  PositionWeights(Of which, int64_t length);

  Fingerprint at(int64_t position) const;
  // The sum of the weights of a span's members, all of which must be positions.
  Fingerprint sum(const Span& span);
  // The prefix sums along a stride: sums[i + stride] = weight(i) + sums[i], and the first `stride` sums are 0.
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

  // The fingerprint of a tile or of a whole slice: of all pairs of queries x keys within the band, for each of the
  // batch rows and heads.
  Fingerprint of(const Span& batch, const Span& heads, const Span& queries, const Span& keys, const Band& band);

  // The same for only those queries of a slice that are in one of `owned`. Adds the number of these pairs to `*pairs`.
  Fingerprint of_owned(const Slice& slice, const std::vector<Span>& owned, int64_t* pairs);

 private:
  // The fingerprint of batch rows x heads. It is remembered, because the tiles of a plan have few different ones.
  Fingerprint product(const Span& batch, const Span& heads);

  PositionWeights queries_, keys_;
  std::map<std::array<int64_t, 6>, Fingerprint> products_;
};

}  // namespace annulus
