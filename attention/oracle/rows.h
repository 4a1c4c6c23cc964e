// Single rows and single keys of attention in fp64, by the definitions of oracle.h, for problems that are too long for
// all pairs. Keys, or queries, are added part by part, so that ranks can share the work and add up their sums. Used by
// the check by rows (runtime/attend/check_rows.h).
//
// Each result comes with the sum of the magnitudes of its terms, of which rounding.h allows a share as an error. A row
// looks at all keys for those that it counts, in O(length) calls of the pattern's definition, and computes with those
// alone, in O(pairs x D).
//
// Thread safety: an object is used by one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "attention/oracle/oracle.h"
#include "attention/pattern/pattern.h"

namespace annulus {

// A query with its query head, or a key with its kv head.
struct OracleRow {
  int64_t batch = 0, head = 0, index = 0;
};

// The value of each row, fp64 [n, D] (lse: [n]), and for each row, [n], the largest of the elements' sums of magnitudes
// and the largest number that probabilities, or their gradients, are multiplied by in it.
struct ExactRows {
  at::Tensor value, terms, factor;
};

// out, lse and dq of some queries.
class QuerySums {
 public:
  // q and g, the gradient of out, are fp64 [n, D]. They, `counts` and `weight` belong to `rows`.
  QuerySums(std::vector<OracleRow> rows, const AttentionShape& shape, const RowCounts& counts, PairWeight weight,
            at::Tensor q, at::Tensor g, double scale, const OracleSoftmax& softmax = {});

  // Adds the keys with these indices, once each: k and v [B, m, Hk, D] of any dtype.
  void add(const std::vector<int64_t>& keys, const at::Tensor& k, const at::Tensor& v);

  // To add up the sums of several ranks: let `top` become the largest of theirs, by rescale_to(), `most` the largest
  // and `sums` the sum.
  at::Tensor top, most, sums;
  void rescale_to(const at::Tensor& new_top);

  ExactRows out() const;
  ExactRows dq() const;
  at::Tensor lse() const;     // [n]; for rows without keys the sink, or -inf
  at::Tensor pairs() const;   // [n]
  at::Tensor scores() const;  // [n]: the largest sum of magnitudes that is a score, or the lse if it is larger

 private:
  at::Tensor totals() const;  // [n, 1]: the denominators, divided by exp(top)

  std::vector<OracleRow> rows_;
  AttentionShape shape_;
  std::vector<std::shared_ptr<const Count>> counts_;
  PairWeight weight_;
  at::Tensor q_, g_;
  at::Tensor sinks_;  // [n]: that of each row's head; -inf: none
  double scale_, softcap_;
};

// The gradients of the sinks [H] by the queries with these lse [B, H, m], dout and out [B, m, H, D], which are taken as
// they are. One element a head, to be added up over the ranks.
ExactRows sink_sums(const at::Tensor& sinks, const at::Tensor& dout, const at::Tensor& out, const at::Tensor& lse);

// dk and dv of some keys, as functions of the lse and the out of the queries that see them. These are taken as they
// are: computing them would cost all pairs of all these queries.
class KeySums {
 public:
  // k and v are fp64 [n, D].
  KeySums(std::vector<OracleRow> rows, const AttentionShape& shape, const RowCounts& counts, PairWeight weight,
          at::Tensor k, at::Tensor v, double scale, double divisor, const OracleSoftmax& softmax = {});

  // Adds the queries with these indices, once each: q, dout and out [B, m, H, D], lse [B, H, m] of any dtype. out has
  // been divided by `divisor`, the pattern's output_divisor.
  void add(const std::vector<int64_t>& queries, const at::Tensor& q, const at::Tensor& dout, const at::Tensor& out,
           const at::Tensor& lse);

  // To add up the sums of several ranks: `most` becomes the largest and `sums` the sum.
  at::Tensor most, sums;

  ExactRows dk() const;
  ExactRows dv() const;
  at::Tensor pairs() const;   // [n]
  at::Tensor scores() const;  // [n], as above, with the largest lse

 private:
  std::vector<OracleRow> rows_;
  AttentionShape shape_;
  std::vector<std::shared_ptr<const Count>> counts_;
  PairWeight weight_;
  at::Tensor k_, v_;
  double scale_, divisor_, softcap_;
};

// Whether the blocks that adaptive maps selected for the query blocks of some rows are those of the definition, as
// selection_fault() says it for all of them: from the means of all key blocks, and of these query blocks.
class SelectionOfRows {
 public:
  // Returns the queries [first, end) of all batch rows and heads, [B, end - first, H, D].
  using QueriesAt = std::function<at::Tensor(int64_t first, int64_t end)>;

  // `selected` is `asked` with each adaptive map replaced by a given one.
  SelectionOfRows(const PatternSpec& asked, const PatternSpec& selected, const AttentionShape& shape,
                  std::vector<OracleRow> rows, int64_t head_dim);

  bool empty() const { return sums.numel() == 0; }  // there is no adaptive map
  // Adds the keys with these indices, once each: k [B, m, Hk, D].
  void add_keys(const std::vector<int64_t>& keys, const at::Tensor& k);
  // Adds the query blocks of rows[n], once.
  void add_queries(size_t n, const QueriesAt& queries);
  at::Tensor sums;  // to be added up over the ranks

  std::string fault() const;  // "" if there is none

 private:
  int64_t place_of_key(int64_t map_begin, int64_t block, int64_t b, int64_t kv_head, int64_t key) const;
  void add_row(int64_t place, const double* row);

  PatternSpec asked_, selected_;
  AttentionShape shape_;
  std::vector<OracleRow> rows_;
  int64_t dim_;
};

}  // namespace annulus
