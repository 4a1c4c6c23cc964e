// See slices.h. docs/explanation/attention.md, "Prefix trees", has the definition.
#include "attention/pattern/slices.h"

#include <algorithm>

#include "attention/pattern/checks.h"
#include "attention/pattern/spec_names.h"
#include "common/text.h"

namespace annulus {

std::string tree_fault(const std::vector<int64_t>& lengths, const std::vector<int64_t>& parents) {
  const auto nodes = static_cast<int64_t>(lengths.size());
  if (lengths.size() != parents.size()) {
    return "each node of a tree has a length and a parent: got " + counted(nodes, "length") + " and " +
           counted(static_cast<int64_t>(parents.size()), "parent");
  }
  int64_t sum = 0;
  std::vector<int64_t> open;  // the node before and its ancestors, the root first, and so in ascending order
  for (int64_t i = 0; i < nodes; ++i) {
    const int64_t length = lengths[static_cast<size_t>(i)], parent = parents[static_cast<size_t>(i)];
    if (length < 0) return "node " + str(i) + " of a tree must have a length of at least 0, got " + str(length);
    if (length > kLongest || (sum += length) > kLongest) return "the lengths of a tree add up to over 2^40";
    while (!open.empty() && open.back() > parent) open.pop_back();
    if (parent != -1 && (open.empty() || open.back() != parent)) {
      return "node " + str(i) + " of a tree cannot have the parent " + str(parent) +
             (parent > i ? ", which comes after it: " : ": ") +
             (i == 0 ? "the first node is a root, which has the parent -1"
                     : "nodes are in depth-first order, so its parent is node " + str(i - 1) +
                           ", an ancestor of that node, or -1 for a root");
    }
    open.push_back(i);
  }
  return "";
}

void append_tree(const TreeSpec& spec, const AttentionShape& shape, std::vector<Slice>& slices) {
  const size_t rows = spec.lengths.size();
  for (size_t row = 0, past = 0; row < rows; row = past) {
    for (past = row + 1;
         past < rows && spec.lengths[past] == spec.lengths[row] && spec.parents[past] == spec.parents[row];) {
      ++past;
    }
    const Span batch =
        rows == 1 ? Span::range(0, shape.batch) : Span::range(static_cast<int64_t>(row), static_cast<int64_t>(past));
    const std::vector<int64_t>&lengths = spec.lengths[row], &parents = spec.parents[row];
    std::vector<int64_t> ends(lengths.size());  // of the nodes' tokens, and then of their subtrees' as well
    int64_t end = 0;
    for (size_t i = 0; i < ends.size(); ++i) ends[i] = end += lengths[i];
    std::vector<int64_t> subtree_ends = ends;
    for (size_t i = ends.size(); i-- > 0;) {
      if (parents[i] < 0) continue;
      int64_t& of_parent = subtree_ends[static_cast<size_t>(parents[i])];
      of_parent = std::max(of_parent, subtree_ends[i]);
    }
    for (size_t i = 0; i < ends.size(); ++i) {
      if (lengths[i] == 0) continue;
      const int64_t begin = ends[i] - lengths[i];
      slices.push_back({batch,
                        Span::range(0, shape.heads),
                        Span::range(begin, subtree_ends[i]),
                        Span::range(begin, ends[i]),
                        {-Band::kUnbounded, 0}});
    }
  }
}

}  // namespace annulus
