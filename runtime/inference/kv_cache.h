// KvCache: the keys and values of a text on the ranks of a communicator, each on one rank, and attention of the
// following tokens to all tokens so far. Used by generator.cc.
//
// The ranks divide the positions of a prompt and compute their own, as in training; its keys and values stay where they
// were computed. All ranks compute every later token. Its key and value are stored on the rank with the fewest, so that
// caches stay even, and what the ranks find in their own keys is merged (attention/execution/merge_over_ranks.h).
//
// Not thread safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "attention/execution/merge_over_ranks.h"
#include "attention/pattern/pattern.h"
#include "attention/plan/layout.h"
#include "attention/plan/plan.h"
#include "comm/communicator.h"
#include "runtime/model/decoder_layer.h"
#include "runtime/model/model_shape.h"
#include "runtime/training/layer_requests.h"

namespace annulus {

struct CacheSettings {
  int64_t context = 0;                      // positions that the patterns cover
  int64_t positions = 0;                    // the most that are ever held, over all ranks; at most `context`
  LayoutKind layout = LayoutKind::kZigzag;  // of a prompt
  // The dtype of cached keys and values; none: the one that the model computes in. They are converted for each use,
  // some of them at a time. A prompt attends to its keys as they are cached, so that it does not matter how the ranks
  // have divided it.
  std::optional<at::ScalarType> stored = {};
};

class KvCache {
 public:
  // `patterns`: of the layers, repeated until each has one. `computed`: dtype and device of q, k and v. `comm`, which
  // must outlive this, carries such tensors. Raises Error(kPlan) if a pattern does not fit settings.context, and
  // Error(kUsage) for an adaptive one over several ranks.
  KvCache(const ModelShape& shape, const std::vector<PatternSpec>& patterns, const CacheSettings& settings,
          const at::TensorOptions& computed, Communicator& comm);

  // Returns the number of positions in the cache, over all ranks.
  int64_t length() const { return length_; }
  // Returns the number of those on this rank.
  int64_t own_length() const { return held_[static_cast<size_t>(comm_.rank())]; }
  void clear();

  // Whether the ranks can divide the next n positions among them: the first ones, if no pattern is adaptive and no rank
  // is without a position.
  bool divides(int64_t n) const;

  // A forward of the next n positions is begin(n) or begin_divided(n), then attend() or attend_divided() in each layer,
  // which stores their keys and values, and end(). Collective.
  //
  // All ranks compute all n positions. q [1, n, heads, D], k and v [1, n, kv_heads, D].
  void begin(int64_t n);
  Attended attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t layer,
                  const at::Tensor& sinks);
  // Each rank computes its positions by the layout of the requests that this returns, whose schedule is the ring, and
  // `attention` is that of these requests (RowForward). Only if divides(n).
  LayerRequests begin_divided(int64_t n);
  Attended attend_divided(const Attend& attention, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          int64_t layer, const at::Tensor& sinks) const;
  void end() { length_ += added_; }

  // Returns the bytes that the cache of a rank takes, and what its use takes for a while, but no plans; in fp64 because
  // sizes of a config.json may be beyond any integer.
  static double bytes(const ModelShape& shape, const std::vector<PatternSpec>& patterns, const CacheSettings& settings,
                      at::ScalarType computed, int ranks);

 private:
  // Consecutive rows of the cache, and the tiles of the forward's queries with them.
  struct Piece {
    int64_t first = 0, count = 0;
    std::vector<Tile> tiles;
  };
  // The pattern of one or more layers.
  struct LayerKind {
    PatternSpec spec;
    bool adaptive = false;
    int64_t divisor = 1;        // of the output
    Pattern whole;              // of `context` queries and keys; empty if the pattern is adaptive
    std::vector<Piece> pieces;  // of the current forward, likewise
  };

  PatternSpec of_prefix(const LayerKind& kind, int64_t n) const;
  void hold(int rank, const Span& positions);
  void put(const at::Tensor& k, const at::Tensor& v, int64_t layer, int64_t first) const;
  std::vector<Piece> pieces_of(const Pattern& pattern) const;
  PartialAttention attend_own(const at::Tensor& q, int64_t layer, const std::vector<Piece>& pieces) const;
  Pattern select(const PatternSpec& spec, int64_t layer) const;
  AttentionShape shape(int64_t length) const;
  const LayerKind& kind_of(int64_t layer) const { return kinds_[kind_of_layer_[static_cast<size_t>(layer)]]; }

  const ModelShape shape_;
  const CacheSettings settings_;
  const at::ScalarType computed_, stored_;
  Communicator& comm_;
  std::vector<LayerKind> kinds_;
  std::vector<size_t> kind_of_layer_;
  int64_t length_ = 0;
  std::vector<int64_t> held_;              // positions, by rank
  std::vector<Span> own_;                  // this rank's positions, in the order of its rows
  std::vector<at::Tensor> keys_, values_;  // per layer [this rank's positions, kv_heads, head_dim]
  // Per layer [context, heads, head_dim] if its pattern is adaptive, because a selection compares queries.
  std::vector<at::Tensor> queries_;

  // Of the current forward:
  int64_t added_ = 0;       // positions
  int64_t own_before_ = 0;  // positions of this rank before them
  at::Tensor taken_;        // int64: which of the rows that all ranks compute this rank stores
};

}  // namespace annulus
