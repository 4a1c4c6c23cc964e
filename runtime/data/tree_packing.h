// Divides prefix trees among rows. A tree that fits a row is in one. Of a larger one each row has some branches, and
// before them the inputs of other branches from which they go on; these are repeated, and their targets count in one
// row only. So the sum of the losses of all rollouts is the same whatever the length of rows. Used by row_index.cc.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/pattern/rollouts.h"
#include "runtime/data/packing.h"
#include "runtime/data/shards/corpus.h"

namespace annulus {

// Takes branches in the order of their tokens and gives what a row holds together to a packer. Some branches of a tree
// may be missing, because another row has them.
class TreePacker {
 public:
  TreePacker(const Corpus& corpus, int64_t context, Packer& packer)
      : corpus_(corpus), context_(context), packer_(packer) {}

  // Adds the positions of a branch, all tokens but its last. Raises Error(kInput) for one that a row cannot hold with
  // what is before it on the path from its root, or that goes on behind what is no input.
  void add(const Branch& branch);
  // Call once, after the last branch.
  void finish() { close(); }

 private:
  bool has(const Piece& piece) const;
  void close();

  const Corpus& corpus_;
  int64_t context_;
  Packer& packer_;
  std::vector<Piece> open_;  // what the next branches may go on from
  int64_t positions_ = 0;    // of these
};

// Returns the lengths of the nodes of which a row consists, in order, and of each its parent or -1 (TreeSpec in
// attention/pattern/pattern.h): a piece is divided where others go on behind its inputs; what the pieces leave of
// `context` positions is padding, a node of its own. Without trees these are the pieces. Raises Error(kInput) for
// pieces that are no trees in depth-first order.
RowParts row_parts(const std::vector<Piece>& pieces, int64_t context);

}  // namespace annulus
