// Generates text with a trained model on one rank, with a cache of keys and values, so that a token costs time in
// proportion to the tokens before it, and chooses the next token. Used by runtime/inference/sampler.cc. A generator is
// not thread-safe.
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
  // block maps already read from files. At most `context` positions are kept: when they are full, the later half is
  // read again as the beginning of a new context. Raises Error(kPlan) if a pattern does not fit a sequence of `context`
  // tokens.
  //
  // A pattern covers a whole context, of which the text so far is the beginning. Adaptive maps are selected from the
  // text so far; with query = "mean", from the mean of the known part of a query block.
  Generator(const Model& model, const std::vector<PatternSpec>& patterns, int64_t context);
  // Appends tokens (at least one) and returns the logits of what follows them: [vocab], fp32 (fp64 for a model in
  // fp64), CPU.
  at::Tensor feed(const std::vector<int64_t>& tokens);

  // Positions in the cache.
  int64_t length() const { return cache_.length(); }

 private:
  at::Tensor extend(const int64_t* tokens, int64_t n);

  const Model& model_;
  int64_t context_;
  std::vector<int64_t> tokens_;  // what the cache holds
  KvCache cache_;
};

struct Choice {
  double temperature = 1;  // 0: always the largest logit
  int64_t top_k = 0;       // choose among so many of the largest; 0: all
  double top_p = 1;        // of these, the largest whose probabilities add up to this (arXiv 1904.09751)
  uint64_t seed = 0;
};
// Picks a token below `limit` from logits [vocab] by softmax(logits / temperature) over the tokens that `choice`
// leaves. Draw number i of a seed is always the same.
int64_t pick(const at::Tensor& logits, int64_t limit, const Choice& choice, int64_t i);

// Turns bytes into text for a terminal: complete UTF-8 characters pass; everything else becomes U+FFFD, as do control
// characters except newline and tab.
class Utf8Stream {
 public:
  // Returns what can be shown now.
  std::string push(unsigned char byte);
  // Returns what is left: U+FFFD if a character is incomplete, or nothing.
  std::string finish();

 private:
  std::string pending_;
  size_t need_ = 0;  // bytes of the pending character
};

}  // namespace annulus
