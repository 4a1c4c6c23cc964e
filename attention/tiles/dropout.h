// Dropout on attention probabilities: out = sum p z v / (1 - rate) with the lse of the undropped scores, where z is 0
// or 1 for each pair. The draw is a function of (seed, step, layer, global batch row, query head, query, key) alone, so
// it is the same for every number of ranks, layout and schedule, and in the backward; a pair counted twice shares one
// draw.
//
// The generator is Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3).
// Its key mixes seed, step, layer, batch row and head; its counter is (key position / 4, query); word (key position mod
// 4) below rate x 2^32 drops the pair. docs/attention.md, "Dropout".
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "attention/pattern/span.h"

namespace annulus {

struct Dropout {
  double rate = 0;  // probability to drop a pair, [0, 1)
  uint64_t seed = 0;
  int64_t step = 0;
  int64_t layer = 0;
  int64_t first_row = 0;  // global number of batch row 0 of this call

  friend bool operator==(const Dropout&, const Dropout&) = default;
};

// The generator's key for a batch row and query head of the call, and below which word a pair is dropped: what
// draw_row() takes (draws.h).
uint64_t philox_key(const Dropout& dropout, int64_t batch_row, int64_t head);
uint64_t drop_threshold(const Dropout& dropout);

// z / (1 - rate) of the pairs (queries x keys, positions) for these batch rows and query heads: [b, h, n, m], of the
// dtype and device of `like`. rate must not be 0.
at::Tensor dropout_factors(const Dropout& dropout, const Span& batch, const Span& heads, const Span& queries,
                           const Span& keys, const at::Tensor& like);

}  // namespace annulus
