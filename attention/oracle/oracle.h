// The oracle of all attention: dense fp64, from a predicate over (batch row, head, query index, key index) written
// straight from the definitions in docs/attention.md. It never sees the slices that patterns are cut into, a plan or a
// tile. For tests and for `annulus attend --check`.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "attention/pattern/pattern.h"

namespace annulus {

// How often a pair is counted.
using Count = std::function<int64_t(int64_t batch, int64_t head, int64_t query, int64_t key)>;

// For every kind, by its definition; the random blocks of bigbird and maps that were read, selected or given are those
// of make_block_map. Raises as make_pattern does. The result is a function of its arguments, and thread-safe.
Count count_of(const PatternSpec& spec, const AttentionShape& shape);

// What the probability of a pair is multiplied with before the values are added up: dropout. Empty: 1.
using PairWeight = std::function<double(int64_t batch, int64_t head, int64_t query, int64_t key)>;

struct OracleResult {
  at::Tensor out, lse;    // [B, Sq, H, D], [B, H, Sq]; fp64
  at::Tensor dq, dk, dv;  // like q, k, v; fp64
};

// q, dout [B, Sq, H, D], k and v [B, Sk, Hk, D]. Pairs with count 0 contribute nothing, whatever the values there.
// lse is that of the unweighted scores.
OracleResult oracle(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& dout, double scale,
                    const Count& count, const PairWeight& weight = {});

}  // namespace annulus
