// Text generation with a trained model on one rank, with a cache of keys and values, so that a token costs time
// proportional to the preceding tokens, and sampling of the next token. Used by runtime/inference/sampler.cc. A
// generator is not thread safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "attention/pattern/pattern.h"
#include "runtime/model/kv_cache.h"
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
  int64_t length() const { return cache_.length(); }

 private:
  at::Tensor extend(const int64_t* tokens, int64_t n);

  const Model& model_;
  int64_t context_;
  std::vector<int64_t> tokens_;  // those in the cache
  KvCache cache_;
};

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
