// The oracle, the reference for all attention: dense fp64 attention from a predicate over (batch row, head, query
// index, key index) that is written directly from the definitions in docs/attention.md, draws and selections included.
// It never sees a plan, a tile, or the slices and block maps that patterns are turned into. Used by tests, `annulus
// attend --check` and the GPU benchmark.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>

#include "attention/pattern/pattern.h"

namespace annulus {

// Returns how often a pair is counted.
using Count = std::function<int64_t(int64_t batch, int64_t head, int64_t query, int64_t key)>;

// The count of every pair by the definition of the pattern's kind. Of a map that a program has given or that was read
// from a file, the data of its BlockMap are the definition. Raises the errors of validate(), and std::logic_error for
// maps that are adaptive or yet to be read. The returned function has no state and is thread safe.
Count count_of(const PatternSpec& spec, const AttentionShape& shape);

// The same for patterns with adaptive maps, whose blocks are selected from q [B, Sq, H, D] and k [B, Sk, Hk, D], CPU
// tensors of any dtype, by the definition: means and scores in fp64, equal scores to the lower block. Blocks whose
// scores differ only by the rounding of these sums may be ranked differently by code that adds in another order:
// compare with such inputs only where no scores are that near, or where the sums are exact (small whole numbers, whole
// blocks). selection_fault() allows for rounding.
Count count_of(const PatternSpec& spec, const AttentionShape& shape, const at::Tensor& q, const at::Tensor& k);

// What is wrong with `selected`, which must be `asked` with a given map in place of each adaptive one: the first query
// block whose selection is not one that the definition allows, for q and k as above. Empty if there is none. A block
// may stand in for another if their scores are nearer to each other than the rounding of sums in any order.
std::string selection_fault(const PatternSpec& asked, const PatternSpec& selected, const AttentionShape& shape,
                            const at::Tensor& q, const at::Tensor& k);

// The factor of a pair's probability in the sum of values, for dropout. An empty function stands for 1.
using PairWeight = std::function<double(int64_t batch, int64_t head, int64_t query, int64_t key)>;

// What dropout's draw is a function of, beside the pair. The fields are those of Dropout (attention/dropout/dropout.h).
struct OracleDropout {
  double rate = 0;
  uint64_t seed = 0;
  int64_t step = 0;
  int64_t layer = 0;
  int64_t first_row = 0;  // the global number of batch row 0
};

// The factor z / (1 - rate) of every pair; empty if the rate is 0. The returned function has no state and is thread
// safe.
PairWeight weight_of(const OracleDropout& dropout);

struct OracleResult {
  at::Tensor out, lse;    // [B, Sq, H, D] and [B, H, Sq]; fp64
  at::Tensor dq, dk, dv;  // like q, k, v; fp64
};

// Computes forward and backward in fp64 for CPU tensors of any dtype: q and dout [B, Sq, H, D], k and v [B, Sk, Hk, D].
// Pairs with count 0 contribute nothing, not even infinities or NaN. lse is that of the unweighted scores.
OracleResult oracle(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& dout, double scale,
                    const Count& count, const PairWeight& weight = {});

}  // namespace annulus
