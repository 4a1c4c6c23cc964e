// The oracle, the reference for all attention: dense fp64 attention by a predicate over (batch row, head, query index,
// key index) that follows the definitions in docs/explanation/attention.md directly, random draws and selections
// included. It uses no plan, tile, or slices and block maps made from patterns. Used by tests, `annulus attend --check`
// and the GPU benchmark. rows.h computes single rows of long problems.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "attention/pattern/pattern.h"

namespace annulus {

// Returns how often a pair is counted; 0 if it is masked.
using Count = std::function<int64_t(int64_t batch, int64_t head, int64_t query, int64_t key)>;

// Returns the count of every pair by the definition of the pattern's kind. The BlockMap of a given or loaded map is its
// definition. Raises the errors of validate(), and std::logic_error for maps that are adaptive or not yet loaded. The
// returned function has no state and is thread safe.
Count count_of(const PatternSpec& spec, const AttentionShape& shape);

// Supports adaptive maps as well, whose blocks are selected from q [B, Sq, H, D] and k [B, Sk, Hk, D], CPU tensors of
// any dtype, by the definition: means and scores in fp64, ties to the lower block. Code that adds in another order may
// rank blocks differently if their scores differ only by rounding: compare with it only for inputs without such near
// ties, or with exact sums (small whole numbers, whole blocks). selection_fault() allows for rounding.
Count count_of(const PatternSpec& spec, const AttentionShape& shape, const at::Tensor& q, const at::Tensor& k);

// The counts of single queries and keys of a long problem: of slices, those alone are looked at that contain the query
// or the key. Made in O(length + slices), as is a function that it returns for a pattern with slices; one call of such
// a function takes O(depth) for a tree and O(1) for every other kind. Raises the errors of the first count_of().
class RowCounts {
 public:
  RowCounts(const PatternSpec& spec, const AttentionShape& shape);

  // Return functions that are right for the pairs of this query, or of this key in all heads, and for no others.
  std::shared_ptr<const Count> of_query(int64_t batch, int64_t head, int64_t query) const;
  std::shared_ptr<const Count> of_key(int64_t batch, int64_t key) const;

 private:
  PatternSpec spec_;
  AttentionShape shape_;
  std::shared_ptr<const Count> all_;
};

// Checks `selected`, which is `asked` with each adaptive map replaced by a given one, against q and k as above.
// Describes the first query block whose selection the definition does not allow; "" if there is none. Blocks whose
// scores differ by less than the rounding error of sums in any order are interchangeable.
std::string selection_fault(const PatternSpec& asked, const PatternSpec& selected, const AttentionShape& shape,
                            const at::Tensor& q, const at::Tensor& k);

// Returns dropout's factor of a pair's probability. An empty function stands for 1.
using PairWeight = std::function<double(int64_t batch, int64_t head, int64_t query, int64_t key)>;

// The inputs of dropout's draw besides the pair, as in Dropout (attention/dropout/dropout.h).
struct OracleDropout {
  double rate = 0;
  uint64_t seed = 0;
  int64_t step = 0;
  int64_t layer = 0;
  int64_t first_row = 0;  // the global number of batch row 0
};

// Returns the factor z / (1 - rate) of every pair; empty if the rate is 0. The returned function has no state and is
// thread safe.
PairWeight weight_of(const OracleDropout& dropout);

// How scores follow from scale * q.k, and what else is in the softmax.
struct OracleSoftmax {
  double softcap = 0;     // c > 0: the score is c tanh(scale q.k / c), to which the logarithm of the count is added
  at::Tensor sinks = {};  // [H]: the score of one more key, with the value 0, that every query of a head sees
};

struct OracleResult {
  at::Tensor out, lse;     // [B, Sq, H, D] and [B, H, Sq]; fp64
  at::Tensor dq, dk, dv;   // like q, k, v; fp64
  at::Tensor dsinks = {};  // [H]; undefined without sinks
};

// Computes forward and backward in fp64 for CPU tensors of any dtype: q and dout [B, Sq, H, D], k and v [B, Sk, Hk, D].
// Pairs with count 0 contribute nothing, not even infinities or NaN. lse is without dropout.
OracleResult oracle(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& dout, double scale,
                    const Count& count, const PairWeight& weight = {}, const OracleSoftmax& softmax = {});

}  // namespace annulus
