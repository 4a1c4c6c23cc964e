// Text generation with a trained model on one rank: a key/value cache, so that a token costs time proportional to the
// preceding tokens, and sampling of the next token. Used by runtime/inference/sampler.cc. A generator is not
// thread safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attention/pattern/pattern.h"
#include "comm/communicator.h"
#include "runtime/model/model.h"

namespace annulus {

class Generator {
 public:
  // `model` must outlive this. `patterns`: one for all layers, or one for each; for one batch row (of_batch_rows), with
  // block maps already loaded. The cache holds `context` positions: when it is full, the later half of the tokens is
  // fed again as the beginning of a new context. Raises Error(kPlan) if a pattern is invalid for a sequence of
  // `context` tokens.
  //
  // A pattern covers a whole context, of which the text so far is a prefix. Adaptive maps are selected from the text so
  // far; with query = "mean", from the mean of the known part of a query block.
  Generator(const Model& model, const std::vector<PatternSpec>& patterns, int64_t context);
  // Appends tokens (at least one) and returns the logits of the next token: [vocab], fp32 (fp64 for a model in fp64),
  // CPU.
  at::Tensor feed(const std::vector<int64_t>& tokens);

  // Returns the number of positions in the cache.
  int64_t length() const { return static_cast<int64_t>(tokens_.size()); }

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
    Bias bias;           // of the current call; likewise
  };

  at::Tensor extend(const int64_t* tokens, int64_t n);
  at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t layer);
  Bias bias_of(const Pattern& pattern, int64_t n) const;
  Pattern select(const PatternSpec& spec, int64_t layer, int64_t n) const;
  AttentionShape shape(int64_t length) const;

  const Model& model_;
  int64_t context_;
  std::vector<LayerKind> kinds_;
  std::vector<size_t> kind_of_layer_;
  std::vector<int64_t> tokens_;     // those in the cache
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

struct Choice {
  double temperature = 1;  // 0: greedy
  int64_t top_k = 0;       // sample among the k largest logits; 0: all
  double top_p = 1;        // nucleus sampling among these (arXiv 1904.09751)
  uint64_t seed = 0;
};
// Samples a token below `limit` from softmax(logits / temperature) over the tokens that top_k and top_p leave; logits
// [vocab]. Draw i is a function of the seed and i.
int64_t pick(const at::Tensor& logits, int64_t limit, const Choice& choice, int64_t i);

// Converts bytes to text for a terminal: complete UTF-8 characters pass; everything else, and control characters except
// newline and tab, become U+FFFD.
class Utf8Stream {
 public:
  // Returns the text completed by this byte.
  std::string push(unsigned char byte);
  // Returns the rest: U+FFFD if a character is incomplete, or "".
  std::string finish();

 private:
  std::string pending_;
  size_t need_ = 0;  // bytes of the pending character
};

}  // namespace annulus
