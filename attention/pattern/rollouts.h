// Makes the prefix tree of some rollouts, and what a model needs besides a tree's pattern: the position of each token
// and the targets of a loss over all rollouts. Used by python/ops, by the readers of data (runtime/data), by training
// and inference, and by programs. It needs no LibTorch.
//
// `lengths` and `parents` describe one row as in TreeSpec (pattern.h). Each leaf is a rollout: the tokens on the path
// from its root. A node may have no tokens, as the leaf of a rollout that ends where another one goes on has. The
// functions raise Error(kUsage) for lengths and parents that are no trees in depth-first order, and are thread safe.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/pattern/span.h"

namespace annulus {

// Returns the position of each token of the row, as rotary embeddings count it: how many tokens are before it on the
// path from its root.
std::vector<int64_t> tree_positions(const std::vector<int64_t>& lengths, const std::vector<int64_t>& parents);

// The parts of a packed row in order: documents, each of which is a root, or the nodes of trees.
struct RowParts {
  std::vector<int64_t> lengths, parents;  // as in TreeSpec; the lengths add up to the row's

  bool has_trees() const;  // whether a part has a parent
  friend bool operator==(const RowParts&, const RowParts&) = default;
};

// Returns tree_positions of the tokens at some positions of the row, one span of it after the other, without making
// those of the whole row.
std::vector<int64_t> path_positions(const RowParts& parts, const std::vector<Span>& tokens);

// What predicts what, one target an index, in ascending order of `target`: the token at row index target[i] comes after
// the one at source[i] in weight[i] rollouts, those of the leaves below it. The last token of a node has a target in
// each child, and the first token of a root is no target. The sum over the targets of weight x loss is the sum of the
// losses of all rollouts.
struct TreeTargets {
  std::vector<int64_t> source, target, weight;
};
TreeTargets tree_targets(const std::vector<int64_t>& lengths, const std::vector<int64_t>& parents);

// A row of tokens in depth-first order with its nodes, and the leaf of each rollout.
struct RolloutTree {
  std::vector<int64_t> tokens, lengths, parents, leaves;
};

// Merges the common prefixes of rollouts, in time proportional to their tokens. Children are in the order in which
// their first rollouts are given. Each rollout has a leaf of its own, so equal rollouts, and those that others go on
// from, get leaves without tokens.
RolloutTree tree_of_rollouts(const std::vector<std::vector<int64_t>>& rollouts);

}  // namespace annulus
