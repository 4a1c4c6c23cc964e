// Tests of prefix trees of rollouts against the rollouts themselves: tokens, positions and targets.
#include "attention/pattern/rollouts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "attention/oracle/oracle.h"
#include "common/error.h"

namespace annulus::rollouts_test {
namespace {

using Numbers = std::vector<int64_t>;

// The row indices of the tokens on the path from the root to a node.
Numbers path_to(const RolloutTree& tree, int64_t node) {
  Numbers path;
  for (; node >= 0; node = tree.parents.at(static_cast<size_t>(node))) {
    int64_t begin = 0;
    for (int64_t i = 0; i < node; ++i) begin += tree.lengths[static_cast<size_t>(i)];
    for (int64_t i = tree.lengths[static_cast<size_t>(node)]; i-- > 0;) path.push_back(begin + i);
  }
  std::reverse(path.begin(), path.end());
  return path;
}

RC_GTEST_PROP(Rollouts, AreThePathsOfTheirTree, ()) {
  std::vector<Numbers> rollouts;
  for (int64_t n = *rc::gen::inRange<int64_t>(1, 9); n > 0; --n) {
    rollouts.push_back(*rc::gen::container<Numbers>(*rc::gen::inRange<size_t>(0, 9), rc::gen::inRange<int64_t>(0, 3)));
  }
  const RolloutTree tree = tree_of_rollouts(rollouts);
  const Numbers positions = tree_positions(tree.lengths, tree.parents);
  const TreeTargets targets = tree_targets(tree.lengths, tree.parents);
  RC_ASSERT(positions.size() == tree.tokens.size());
  std::set<Numbers> prefixes;
  std::map<std::pair<int64_t, int64_t>, int64_t> expected;  // how many rollouts have these two tokens in a row
  std::vector<Numbers> paths;
  for (size_t r = 0; r < rollouts.size(); ++r) {
    const Numbers& path = paths.emplace_back(path_to(tree, tree.leaves.at(r)));
    RC_ASSERT(path.size() == rollouts[r].size());
    for (size_t i = 0; i < path.size(); ++i) {
      const auto row = static_cast<size_t>(path[i]);
      RC_ASSERT(tree.tokens.at(row) == rollouts[r][i]);
      RC_ASSERT(positions.at(row) == static_cast<int64_t>(i));
      prefixes.insert(Numbers(rollouts[r].begin(), rollouts[r].begin() + static_cast<ptrdiff_t>(i) + 1));
      if (i > 0) ++expected[{path[i - 1], path[i]}];
    }
  }
  RC_ASSERT(tree.tokens.size() == prefixes.size());  // each stands in the row once
  RC_ASSERT(std::set<int64_t>(tree.leaves.begin(), tree.leaves.end()).size() == rollouts.size());
  std::map<std::pair<int64_t, int64_t>, int64_t> got;
  for (size_t i = 0; i < targets.target.size(); ++i) {
    RC_ASSERT(i == 0 || targets.target[i - 1] < targets.target[i]);
    got[{targets.source.at(i), targets.target[i]}] = targets.weight.at(i);
  }
  RC_ASSERT(got == expected);

  // A token sees those that are before it in any rollout, and itself.
  PatternSpec spec;
  spec.kind = PatternSpec::Kind::kTree;
  spec.tree = {{tree.lengths}, {tree.parents}};
  const auto tokens = static_cast<int64_t>(tree.tokens.size());
  const Count count = count_of(spec, {1, 1, 1, tokens, tokens, 0});
  std::set<std::pair<int64_t, int64_t>> seen;
  for (const Numbers& path : paths) {
    for (size_t q = 0; q < path.size(); ++q) {
      for (size_t k = 0; k <= q; ++k) seen.emplace(path[q], path[k]);
    }
  }
  for (int64_t q = 0; q < tokens; ++q) {
    for (int64_t k = 0; k < tokens; ++k) RC_ASSERT(count(0, 0, q, k) == static_cast<int64_t>(seen.contains({q, k})));
  }
}

TEST(Rollouts, ShareTheirPrefixes) {
  const RolloutTree tree = tree_of_rollouts({{1, 2, 3, 4}, {1, 2, 5}, {7}, {1, 2, 3, 4}, {1, 2, 3}});
  EXPECT_EQ(tree.tokens, (Numbers{1, 2, 3, 4, 5, 7}));
  EXPECT_EQ(tree.lengths, (Numbers{2, 1, 1, 0, 0, 0, 1, 1}));
  EXPECT_EQ(tree.parents, (Numbers{-1, 0, 1, 2, 2, 1, 0, -1}));
  EXPECT_EQ(tree.leaves, (Numbers{3, 6, 7, 4, 5}));
  EXPECT_EQ(tree_positions(tree.lengths, tree.parents), (Numbers{0, 1, 2, 3, 2, 0}));
  const TreeTargets targets = tree_targets(tree.lengths, tree.parents);
  EXPECT_EQ(targets.source, (Numbers{0, 1, 2, 1}));
  EXPECT_EQ(targets.target, (Numbers{1, 2, 3, 4}));
  EXPECT_EQ(targets.weight, (Numbers{4, 3, 2, 1}));
  EXPECT_TRUE(tree_of_rollouts({}).lengths.empty());
  EXPECT_TRUE(tree_positions({}, {}).empty());
}

// A caterpillar of as many nodes as rollouts is walked without recursion.
TEST(Rollouts, MayPartAtEveryToken) {
  std::vector<Numbers> rollouts;
  for (int64_t n = 0; n < 2000; ++n) {
    rollouts.emplace_back(static_cast<size_t>(n), 5);
    rollouts.back().push_back(6);
  }
  const RolloutTree tree = tree_of_rollouts(rollouts);
  EXPECT_EQ(tree.tokens.size(), 2000u + 1999u);
  EXPECT_EQ(tree_positions(tree.lengths, tree.parents).size(), tree.tokens.size());
}

TEST(Rollouts, RefuseWhatIsNoTree) {
  for (const Numbers& parents : {Numbers{-1, 2, 0}, Numbers{-1, 0}}) {
    try {
      tree_targets({1, 1, 1}, parents);
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUsage);
      EXPECT_THAT(error.what(), ::testing::HasSubstr("node"));
    }
    EXPECT_THROW(tree_positions({1, 1, 1}, parents), Error);
  }
}

}  // namespace
}  // namespace annulus::rollouts_test
