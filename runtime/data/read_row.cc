// See read_row.h.
#include "runtime/data/read_row.h"

#include <algorithm>
#include <string>

#include "runtime/data/shards/refuse.h"

namespace annulus {

void read_row(const Corpus& corpus, const std::vector<Piece>& pieces, const std::vector<Span>& positions,
              const TokenRules& rules, int64_t* tokens, int64_t* targets, float* weights) {
  const auto read_from = [&](int64_t first, const Span& of, int64_t* to) {
    corpus.read(first, of.count, to, of.stride);
    if (rules.vocab == 0) return;
    const int64_t* beyond = std::find_if(to, to + of.count, [&](int64_t id) { return id >= rules.vocab; });
    if (beyond == to + of.count) return;
    refuse_data(corpus.where(first + (beyond - to) * of.stride) + " is the id " + std::to_string(*beyond) +
                ", beyond model.vocab = " + std::to_string(rules.vocab) +
                ": check that the file has this tokenizer, format and width");
  };
  // Takes over the weights of the targets of neighbouring or strided tokens, the first of which is `first`.
  const auto weigh = [&](int64_t first, const Span& of, int64_t* its_targets, float* its_weights) {
    // The index of the first of them that is this token or behind it.
    const auto index = [&](int64_t token) { return (token - first + of.stride - 1) / of.stride; };
    corpus.visit_weights(first, (of.count - 1) * of.stride + 1, [&](int64_t begin, int64_t count, float weight) {
      const int64_t from = index(begin), n = index(begin + count) - from;
      if (weight == 0) std::fill_n(its_targets + from, n, kNoTarget);
      if (its_weights != nullptr) std::fill_n(its_weights + from, n, weight);
    });
  };
  std::vector<int64_t> both;  // the tokens of a piece and the one that follows them
  for (const Span& span : positions) {
    std::fill_n(tokens, span.count, 0);
    std::fill_n(targets, span.count, kNoTarget);
    if (weights != nullptr) std::fill_n(weights, span.count, 1.0F);
    int64_t begin = 0;  // of the piece in the row
    for (const Piece& piece : pieces) {
      const Span own = span.clip(begin, begin + piece.count - 1);
      if (!own.empty()) {
        const int64_t first = piece.token + own.begin - begin, at = span.index_of(own.begin);
        if (own.stride == 1) {  // neighbouring positions: each target but the last is also the next token
          both.resize(static_cast<size_t>(own.count) + 1);
          read_from(first, {0, 1, own.count + 1}, both.data());
          std::copy_n(both.begin(), own.count, tokens + at);
          std::copy_n(both.begin() + 1, own.count, targets + at);
        } else {
          read_from(first, own, tokens + at);
          read_from(first + 1, own, targets + at);
        }
        if (piece.repeated) {
          std::fill_n(targets + at, own.count, kNoTarget);
        } else if (corpus.marks_targets()) {
          weigh(first + 1, own, targets + at, weights == nullptr ? nullptr : weights + at);
        }
      }
      begin += piece.count;
    }
    for (const int64_t ignored : rules.ignore) std::replace(targets, targets + span.count, ignored, kNoTarget);
    for (int64_t i = 0; weights != nullptr && i < span.count; ++i) {
      if (targets[i] == kNoTarget) weights[i] = 0;
    }
    tokens += span.count;
    targets += span.count;
    if (weights != nullptr) weights += span.count;
  }
}

}  // namespace annulus
