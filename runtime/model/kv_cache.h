// KvCache: the keys and values of a text on one rank, and attention of the following tokens to all tokens so far.
// Used by generator.cc. Not thread safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "attention/pattern/pattern.h"
#include "comm/communicator.h"
#include "runtime/model/model_shape.h"

namespace annulus {

class KvCache {
 public:
  // `patterns`: one for all layers, or one for each, of at most `context` positions. Raises Error(kPlan) if one does
  // not fit them. `options`: of keys and values.
  KvCache(const ModelShape& shape, const at::TensorOptions& options, const std::vector<PatternSpec>& patterns,
          int64_t context);

  // Returns the number of positions in the cache.
  int64_t length() const { return length_; }
  void clear() { length_ = 0; }
  // A forward of the next n positions: begin(n), then attend() in each layer, which stores their keys and values, and
  // end(n). q [1, n, heads, D], k and v [1, n, kv_heads, D] -> like q.
  void begin(int64_t n);
  at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t layer);
  void end(int64_t n) { length_ += n; }

 private:
  struct Bias {
    at::Tensor values;        // [1 or heads, n, length + n], log of a pair's count
    bool empty_rows = false;  // some query has no key
  };
  // The pattern of one or more layers.
  struct LayerKind {
    PatternSpec spec;
    bool adaptive = false;
    double divisor = 1;  // the output is divided by it
    Pattern whole;       // of `context` queries and keys; empty if the pattern is adaptive
    Bias bias;           // of the current call, likewise
  };

  Bias bias_of(const Pattern& pattern, int64_t n) const;
  Pattern select(const PatternSpec& spec, int64_t layer, int64_t n) const;
  AttentionShape shape(int64_t length) const;

  const ModelShape shape_;
  const int64_t context_;
  std::vector<LayerKind> kinds_;
  std::vector<size_t> kind_of_layer_;
  int64_t length_ = 0;
  std::vector<at::Tensor> keys_;    // per layer [kv_heads, context, head_dim]
  std::vector<at::Tensor> values_;  // likewise
  // Per layer [context, heads, head_dim] if its pattern is adaptive, because a selection compares queries.
  std::vector<at::Tensor> queries_;
  std::shared_ptr<Communicator> self_;
};

// Returns log(count) of the pairs of queries [first, first + n) and keys [0, keys) of batch row 0, -inf for masked
// pairs: [heads, n, keys] of dtype `type`, or [1, n, keys] if all heads are alike. Sets *empty_rows to whether some
// query has no key.
at::Tensor pattern_bias(const Pattern& pattern, int64_t first, int64_t n, int64_t keys, at::ScalarType type,
                        bool* empty_rows);

}  // namespace annulus
