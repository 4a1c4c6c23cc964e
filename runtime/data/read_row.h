// Reads the tokens of a row from its source. Used by the dataset and by runtime/evaluation.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/pattern/span.h"
#include "runtime/data/packing.h"
#include "runtime/data/shards/corpus.h"

namespace annulus {

// The target of a position that does not count: of padding, of ids that are ignored, of tokens that the source marks
// so, and of inputs that are repeated.
inline constexpr int64_t kNoTarget = -1;

// How ids become tokens and targets.
struct TokenRules {
  int64_t vocab = 0;              // every id must be below it; 0: any
  std::vector<int64_t> ignore{};  // ids that do not count as targets
};

// Reads the tokens at some positions of a row that consists of `pieces`, one span after the other, and for each of them
// the token that follows it, its target. Padding has the token 0 and kNoTarget. `weights`, unless it is null, gets the
// weight of each target in the loss, 0 where it does not count. Spans with a stride (striped layouts) read the files
// over their whole range. Raises Error(kInput) if a file has changed, cannot be read, or holds an id
// outside the vocabulary at these positions. Thread-safe.
void read_row(const Corpus& corpus, const std::vector<Piece>& pieces, const std::vector<Span>& positions,
              const TokenRules& rules, int64_t* tokens, int64_t* targets, float* weights = nullptr);

}  // namespace annulus
