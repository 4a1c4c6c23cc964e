// Dropout on attention probabilities: out = sum p z v / (1 - rate) with the lse of the undropped scores, where z is 0
// or 1 for each pair. The draw is a function of (seed, step, layer, global batch row, query head, query, key) alone, so
// forward and backward agree, for every number of ranks, layout and schedule. A pair that is counted twice has one
// draw. Used by kernels and `attend --check`. All functions are thread safe.
//
// The generator is Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3).
// Its key is a hash of seed, step, layer, batch row and head, its counter (key position / 4, query). A pair is dropped
// if word (key position mod 4) is below rate x 2^32. docs/explanation/attention.md, "Dropout", has the formulas.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "attention/pattern/span.h"

namespace annulus {

struct Dropout {
  double rate = 0;  // the probability of dropping a pair, in [0, 1)
  uint64_t seed = 0;
  int64_t step = 0;
  int64_t layer = 0;
  int64_t first_row = 0;   // the global number of batch row 0 of this call
  int64_t first_head = 0;  // the number of query head 0 of the tensors; not 0 only where queries of other ranks come

  friend bool operator==(const Dropout&, const Dropout&) = default;
};

// Return the generator's key for a batch row and query head of the call, and the threshold below which a word drops its
// pair, both for draw_row() (draws.h).
uint64_t philox_key(const Dropout& dropout, int64_t batch_row, int64_t head);
uint64_t drop_threshold(const Dropout& dropout);

// Returns z / (1 - rate) for the pairs of the positions queries x keys, for these batch rows and query heads: [b, h, n,
// m], with the dtype and device of `like`. The rate must be positive.
at::Tensor dropout_factors(const Dropout& dropout, const Span& batch, const Span& heads, const Span& queries,
                           const Span& keys, const at::Tensor& like);

}  // namespace annulus
