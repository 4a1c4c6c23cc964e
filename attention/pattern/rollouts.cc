// See rollouts.h.
#include "attention/pattern/rollouts.h"

#include <algorithm>
#include <string>
#include <unordered_map>
#include <utility>

#include "attention/pattern/slices.h"
#include "common/error.h"

namespace annulus {
namespace {

void require_tree(const std::vector<int64_t>& lengths, const std::vector<int64_t>& parents) {
  if (const std::string fault = tree_fault(lengths, parents); !fault.empty()) {
    throw Error(ErrorKind::kUsage, "pattern", fault);
  }
}

// Rollouts that are equal up to `depth` tokens, of which the node `parent` has the last.
struct Branch {
  std::vector<size_t> rollouts;
  size_t depth = 0;
  int64_t parent = -1;
};

}  // namespace

std::vector<int64_t> tree_positions(const std::vector<int64_t>& lengths, const std::vector<int64_t>& parents) {
  require_tree(lengths, parents);
  std::vector<int64_t> positions, ends;  // ends: of each node the position after its last token
  for (size_t i = 0; i < lengths.size(); ++i) {
    const int64_t begin = parents[i] < 0 ? 0 : ends[static_cast<size_t>(parents[i])];
    ends.push_back(begin + lengths[i]);
    for (int64_t p = begin; p < ends.back(); ++p) positions.push_back(p);
  }
  return positions;
}

bool RowParts::has_trees() const {
  return std::any_of(parents.begin(), parents.end(), [](int64_t parent) { return parent >= 0; });
}

std::vector<int64_t> path_positions(const RowParts& parts, const std::vector<Span>& tokens) {
  require_tree(parts.lengths, parts.parents);
  std::vector<int64_t> ends, shifts;  // of each part: its end in the row, and what its positions are less than places
  int64_t end = 0;
  for (size_t i = 0; i < parts.lengths.size(); ++i) {
    const int64_t parent = parts.parents[i];
    const int64_t begin = parent < 0 ? 0 : ends[static_cast<size_t>(parent)] - shifts[static_cast<size_t>(parent)];
    shifts.push_back(end - begin);
    ends.push_back(end += parts.lengths[i]);
  }
  std::vector<int64_t> positions;
  for (const Span& span : tokens) {
    size_t part = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), span.begin) - ends.begin());
    for (int64_t i = 0; i < span.count; ++i) {
      while (ends.at(part) <= span.at(i)) ++part;
      positions.push_back(span.at(i) - shifts[part]);
    }
  }
  return positions;
}

TreeTargets tree_targets(const std::vector<int64_t>& lengths, const std::vector<int64_t>& parents) {
  require_tree(lengths, parents);
  std::vector<int64_t> leaves(lengths.size(), 0);  // below each node, which is its own if it has no children
  for (size_t i = lengths.size(); i-- > 0;) {
    if (leaves[i] == 0) leaves[i] = 1;
    if (parents[i] >= 0) leaves[static_cast<size_t>(parents[i])] += leaves[i];
  }
  TreeTargets targets;
  std::vector<int64_t> last;  // the last token on the path to and with each node; -1: there is none
  int64_t token = 0;
  for (size_t i = 0; i < lengths.size(); ++i) {
    last.push_back(parents[i] < 0 ? -1 : last[static_cast<size_t>(parents[i])]);
    for (int64_t n = 0; n < lengths[i]; ++n, ++token) {
      if (last.back() >= 0) {
        targets.source.push_back(last.back());
        targets.target.push_back(token);
        targets.weight.push_back(leaves[i]);
      }
      last.back() = token;
    }
  }
  return targets;
}

RolloutTree tree_of_rollouts(const std::vector<std::vector<int64_t>>& rollouts) {
  RolloutTree tree;
  tree.leaves.resize(rollouts.size());
  std::vector<Branch> waiting(1);  // the next one is the last
  for (size_t i = 0; i < rollouts.size(); ++i) waiting[0].rollouts.push_back(i);
  while (!waiting.empty()) {
    const Branch branch = std::move(waiting.back());
    waiting.pop_back();
    if (branch.rollouts.empty()) continue;
    // The rollouts go on together as far as they have the same tokens.
    const std::vector<int64_t>& first = rollouts[branch.rollouts[0]];
    size_t depth = branch.depth;
    const auto goes_on = [&](size_t i) { return depth < rollouts[i].size() && rollouts[i][depth] == first[depth]; };
    const auto all_go_on = [&] {
      if (depth >= first.size()) return false;
      for (const size_t i : branch.rollouts) {
        if (!goes_on(i)) return false;
      }
      return true;
    };
    while (all_go_on()) ++depth;
    int64_t parent = branch.parent;
    if (depth > branch.depth || branch.rollouts.size() == 1) {
      parent = static_cast<int64_t>(tree.lengths.size());
      tree.lengths.push_back(static_cast<int64_t>(depth - branch.depth));
      tree.parents.push_back(branch.parent);
      tree.tokens.insert(tree.tokens.end(), first.begin() + static_cast<ptrdiff_t>(branch.depth),
                         first.begin() + static_cast<ptrdiff_t>(depth));
    }
    if (branch.rollouts.size() == 1) {
      tree.leaves[branch.rollouts[0]] = parent;
      continue;
    }
    // Then they part by their next tokens, and each that ends here is a branch of its own.
    std::vector<Branch> parts;
    std::unordered_map<int64_t, size_t> part_of;
    for (const size_t i : branch.rollouts) {
      if (depth == rollouts[i].size()) {
        parts.push_back({{i}, depth, parent});
        continue;
      }
      const auto [part, is_new] = part_of.try_emplace(rollouts[i][depth], parts.size());
      if (is_new) parts.push_back({{}, depth, parent});
      parts[part->second].rollouts.push_back(i);
    }
    waiting.insert(waiting.end(), std::make_move_iterator(parts.rbegin()), std::make_move_iterator(parts.rend()));
  }
  return tree;
}

}  // namespace annulus
