// The oracle, the reference for all attention: dense fp64 attention from a predicate over (batch row, head, query
// index, key index) that is written directly from the definitions in docs/attention.md. It never sees a plan, a tile,
// or the slices that patterns are cut into. Used by tests, `annulus attend --check` and the GPU benchmark.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "attention/pattern/pattern.h"

namespace annulus {

// Returns how often a pair is counted.
using Count = std::function<int64_t(int64_t batch, int64_t head, int64_t query, int64_t key)>;

// The count of every pair by the definition of the pattern's kind. The random blocks of bigbird, and maps that were
// read, selected or given, come from make_block_map. Raises the errors of make_pattern. The returned function has no
// state and is thread safe.
Count count_of(const PatternSpec& spec, const AttentionShape& shape);

// The factor of a pair's probability in the sum of values, for dropout. An empty function stands for 1.
using PairWeight = std::function<double(int64_t batch, int64_t head, int64_t query, int64_t key)>;

struct OracleResult {
  at::Tensor out, lse;    // [B, Sq, H, D] and [B, H, Sq]; fp64
  at::Tensor dq, dk, dv;  // like q, k, v; fp64
};

// Computes forward and backward in fp64 for CPU tensors of any dtype: q and dout [B, Sq, H, D], k and v [B, Sk, Hk, D].
// Pairs with count 0 contribute nothing, not even infinities or NaN. lse is that of the unweighted scores.
OracleResult oracle(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& dout, double scale,
                    const Count& count, const PairWeight& weight = {});

}  // namespace annulus
