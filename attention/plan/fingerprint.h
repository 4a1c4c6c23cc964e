// Fingerprints of sets of (batch row, query head, query, key): how the verifier compares what tiles compute with what a
// pattern counts without enumerating pairs. Internal to the verifier; shares no code with the planner's intersection.
//
// Batch row b, head h, query q and key k get pseudo-random weights in the field of 2^61 - 1 elements. A set of pairs
// has the sum of the products of its weights, and two multisets that differ have equal sums with probability below
// 2^-58 (Schwartz, JACM 27(4), 1980; Zippel, EUROSAM 1979). Bands over arithmetic progressions are summed with prefix
// sums, so that the work is in rows, not in pairs.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <vector>

#include "attention/pattern/span.h"

namespace annulus {

// In [0, 2^61 - 1).
using Fingerprint = uint64_t;

Fingerprint add(Fingerprint a, Fingerprint b);

// The weights of the positions 0 .. length - 1 of queries or of keys, and their sums along any stride. Not thread-safe:
// the sums of a stride are made when first asked for, 8 bytes a position.
class PositionWeights {
 public:
  enum class Of { kQueries, kKeys };
  PositionWeights(Of which, int64_t length);

  Fingerprint at(int64_t position) const;
  // Of all members of a span within the positions.
  Fingerprint sum(const Span& span);
  // sums[i + stride] = weight(i) + sums[i].
  const std::vector<Fingerprint>& prefix(int64_t stride);

 private:
  Of which_;
  int64_t length_;
  std::map<int64_t, std::vector<Fingerprint>> prefixes_;  // by stride
};

class PairWeights {
 public:
  PairWeights(int64_t queries, int64_t keys);

  // Of a tile or a whole slice: all pairs of queries x keys within the band, for each of the batch rows and heads.
  Fingerprint of(const Span& batch, const Span& heads, const Span& queries, const Span& keys, const Band& band);

  // The same, of those queries alone that are in one of `owned`; adds to `pairs` how many pairs these are.
  Fingerprint of_owned(const Slice& slice, const std::vector<Span>& owned, int64_t* pairs);

 private:
  // Of batch rows x heads: remembered, since tiles have few.
  Fingerprint product(const Span& batch, const Span& heads);

  PositionWeights queries_, keys_;
  std::map<std::array<int64_t, 6>, Fingerprint> products_;
};

}  // namespace annulus
