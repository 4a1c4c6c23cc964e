// See tree_packing.h.
#include "runtime/data/tree_packing.h"

#include <algorithm>
#include <string>
#include <utility>

#include "common/text.h"
#include "runtime/data/shards/refuse.h"

namespace annulus {
namespace {

[[noreturn]] void refuse_tree(const std::string& where) {
  refuse_data("the prefix tree at " + where + " is damaged: check the shard by `annulus tokenize --verify`");
}

// The inputs from the root to this token, branch by branch.
std::vector<Piece> path_to(const Corpus& corpus, int64_t token) {
  std::vector<Piece> path;
  while (token >= 0) {
    const Branch branch = corpus.branch_at(token);
    const int64_t count = token - branch.begin + 1;
    if (count >= branch.length) refuse_tree(corpus.where(token));
    path.push_back({branch.begin, count, branch.after, true});
    token = branch.after;
  }
  std::reverse(path.begin(), path.end());
  return path;
}

int64_t positions_of(const std::vector<Piece>& pieces) {
  int64_t sum = 0;
  for (const Piece& piece : pieces) sum += piece.count;
  return sum;
}

}  // namespace

void TreePacker::add(const Branch& branch) {
  if (branch.length < 2) return;
  std::vector<Piece> path = path_to(corpus_, branch.after);
  const int64_t positions = branch.length - 1, needed = positions_of(path) + positions;
  if (needed > context_) {
    refuse_data("the rollout that ends at " + corpus_.where(branch.begin + positions) + " has " +
                with_commas(needed + 1, "token") + " from its prompt on, but a row takes " + with_commas(context_ + 1) +
                " (data.context + 1): lengthen data.context, or shorten or leave out the rollout");
  }
  const bool begins_tree = path.empty();
  std::erase_if(path, [&](const Piece& piece) { return has(piece); });
  if (begins_tree || positions_ + positions_of(path) + positions > context_) {
    close();
    path = path_to(corpus_, branch.after);
  }
  positions_ += positions_of(path) + positions;
  open_.insert(open_.end(), path.begin(), path.end());
  open_.push_back({branch.begin, positions, branch.after});
}

bool TreePacker::has(const Piece& piece) const {
  return std::any_of(open_.rbegin(), open_.rend(),
                     [&](const Piece& held) { return held.token == piece.token && held.count >= piece.count; });
}

void TreePacker::close() {
  if (!open_.empty()) packer_.add_together(std::exchange(open_, {}));
  positions_ = 0;
}

RowParts row_parts(const std::vector<Piece>& pieces, int64_t context) {
  RowParts parts;
  std::vector<std::pair<int64_t, int64_t>> left;  // the input behind which each piece goes on, and the piece
  for (size_t i = 0; i < pieces.size(); ++i) left.emplace_back(pieces[i].after, i);
  std::sort(left.begin(), left.end());
  std::vector<int64_t> from(pieces.size(), -1);  // the node from which each piece goes on
  int64_t filled = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    if (piece.after >= 0 && from[i] < 0) refuse_tree("token " + with_commas(piece.token) + " of its source");
    int64_t parent = from[i], begin = piece.token;
    const auto node_until = [&](int64_t end) {
      if (end == begin) return;
      parts.lengths.push_back(end - begin);
      parts.parents.push_back(parent);
      parent = static_cast<int64_t>(parts.lengths.size()) - 1;
      begin = end;
    };
    const int64_t end = piece.token + piece.count;
    for (auto at = std::lower_bound(left.begin(), left.end(), std::pair<int64_t, int64_t>{piece.token, 0});
         at != left.end() && at->first < end; ++at) {
      node_until(at->first + 1);
      if (at->second > static_cast<int64_t>(i)) from[static_cast<size_t>(at->second)] = parent;
    }
    node_until(end);
    filled += piece.count;
  }
  if (context > filled) {
    parts.lengths.push_back(context - filled);
    parts.parents.push_back(-1);
  }
  return parts;
}

}  // namespace annulus
