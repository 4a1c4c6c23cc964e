// Tests of rows of prefix trees: every target of every rollout counts once an epoch, behind the tokens of its rollout,
// whatever the length of rows and however often that changes; and what is refused.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "attention/pattern/rollouts.h"
#include "common/error.h"
#include "runtime/data/dataset.h"
#include "runtime/data/tree_packing.h"
#include "tests/common/expect_error.h"
#include "tests/runtime/data/shards/written_trees.h"

namespace annulus::tree_rows_test {
namespace {

namespace fs = std::filesystem;

// By the tokens from the root to an input and its target: the weight of that target.
using Weights = std::map<Ids, float>;

Weights weights_of(const std::vector<Group>& groups) {
  Weights weights;
  for (const Group& group : groups) {
    for (const Rollout& rollout : group) {
      for (size_t i = 1; i < rollout.ids.size(); ++i) {
        weights[{rollout.ids.begin(), rollout.ids.begin() + static_cast<int64_t>(i) + 1}] += rollout.weights[i];
      }
    }
  }
  std::erase_if(weights, [](const auto& entry) { return entry.second == 0; });
  return weights;
}

// Adds what counts in a row, each target behind what its parts say is before it.
void add_row(const Dataset& data, const DrawnRow& row, Weights& weights) {
  const auto n = static_cast<size_t>(row.context);
  Ids tokens(n), targets(n);
  std::vector<float> of(n);
  const Span all = Span::range(0, row.context);
  data.read(row, {all}, tokens.data(), targets.data(), of.data());
  const RowParts parts = row.parts();
  ASSERT_EQ(std::accumulate(parts.lengths.begin(), parts.lengths.end(), int64_t{0}), row.context);
  const Ids positions = path_positions(parts, {all});
  EXPECT_EQ(positions, tree_positions(parts.lengths, parts.parents));
  EXPECT_EQ((Ids{positions[n / 3], positions[n / 3 + 2], positions[1]}),
            path_positions(parts, {{static_cast<int64_t>(n / 3), 2, 2}, {1, 1, 1}}));
  std::vector<Ids> paths;  // from the root to the end of each part
  size_t at = 0;
  for (size_t part = 0; part < parts.lengths.size(); ++part) {
    const int64_t parent = parts.parents[part];
    Ids path = parent < 0 ? Ids{} : paths[static_cast<size_t>(parent)];
    for (int64_t i = 0; i < parts.lengths[part]; ++i, ++at) {
      EXPECT_EQ(positions[at], static_cast<int64_t>(path.size()));
      path.push_back(tokens[at]);
      EXPECT_EQ(of[at] > 0, targets[at] != kNoTarget);
      if (targets[at] == kNoTarget) continue;
      Ids with_target = path;
      with_target.push_back(targets[at]);
      weights[with_target] += of[at];
    }
    paths.push_back(path);
  }
}

class TreeRows : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = ::testing::TempDir() + "/trees";
    fs::remove_all(root_);
  }

  DataConfig config(const std::string& shard, int64_t context, const std::string& packing = "best-fit") const {
    put_file(root_ + "/a.tokens", shard);
    DataConfig d;
    d.train = {root_ + "/a.tokens"};
    d.context = context;
    d.batch = 1;
    d.packing = packing;
    d.documents = true;
    d.positions = "restart";
    d.validation_fraction = 0;
    return d;
  }

  std::string root_;
};

TEST_F(TreeRows, EveryTargetCountsOnce) {
  for (const bool prompts : {false, true}) {
    const std::vector<Group> groups = drawn_groups({1, 0.5F, 2}, prompts);
    const WrittenTrees trees(groups);
    size_t apart = 0;
    for (const Group& group : groups) {
      for (const Rollout& rollout : group) apart += rollout.ids.size();
    }
    EXPECT_LT(trees.tokens(), apart * 2 / 3);
    for (const std::string packing : {"best-fit", "document"}) {
      for (const int64_t context : {28, 37, 64, 400}) {  // the first two are shorter than trees
        const Dataset data(config(trees.shard(), context, packing), 3);
        const Corpus corpus(config(trees.shard(), context).train.list[0]);
        corpus.verify();
        const auto index =
            RowIndex::make(corpus, Dataset::pack_settings(config(trees.shard(), context, packing), context));
        index->verify();
        Weights found;
        bool divides = false;
        SourceUse use;
        for (int64_t r = 0; r < index->rows(Split::kTrain); ++r) {
          const DrawnRow row{.source = 0, .context = context, .pieces = index->row(Split::kTrain, r)};
          for (const Piece& piece : row.pieces) divides = divides || piece.repeated;
          add_row(data, row, found);
          use.add(row.use());
        }
        EXPECT_EQ(found, weights_of(groups)) << packing << ", " << context;
        EXPECT_EQ(divides, context < 64) << context;
        EXPECT_EQ(use.targets, index->targets(Split::kTrain));
        EXPECT_EQ(use.targets, static_cast<int64_t>(trees.tokens() - trees.branches()));
        EXPECT_EQ(index->counts(Split::kTrain).documents, static_cast<int64_t>(groups.size()));
        // A run draws each row once an epoch.
        Weights drawn;
        for (int64_t step = 0; step < index->rows(Split::kTrain); ++step) add_row(data, data.drawn(step, 0), drawn);
        EXPECT_EQ(drawn, found);
        EXPECT_EQ(data.epochs(0, index->rows(Split::kTrain)), 1);
      }
    }
  }
}

// What is left of an epoch when the length of rows changes is packed again, with the inputs that it needs before it.
TEST_F(TreeRows, AnEpochGoesOnInRowsOfOtherLengths) {
  const std::vector<Group> groups = drawn_groups({1, 2}, true);
  for (const auto& [first, then] : std::vector<std::pair<int64_t, int64_t>>{{64, 30}, {30, 64}, {37, 28}}) {
    DataConfig d = config(WrittenTrees(groups).shard(), first);
    d.context.stages = {{.step = 0, .context = first}, {.step = 4, .context = then}};
    const Dataset data(d, 5);
    Weights found;
    int64_t step = 0;
    for (; data.epochs(0, step) < 1 - 1e-9; ++step) {
      EXPECT_EQ(data.context(step), step < 4 ? first : then);
      add_row(data, data.drawn(step, 0), found);
    }
    EXPECT_GT(step, 5);
    EXPECT_EQ(found, weights_of(groups)) << first << ", then " << then;
    // A resumed run draws the same rows.
    Dataset again(d, 5);
    EXPECT_TRUE(again.resume(data.state(6, {{}}), 6).empty());
    for (int64_t s = 6; s < step; ++s) EXPECT_EQ(again.drawn(s, 0).pieces, data.drawn(s, 0).pieces);
  }
}

TEST_F(TreeRows, AGroupIsHeldOutAsAWhole) {
  const std::vector<Group> groups = drawn_groups({1});
  for (const double fraction : {0.3, 0.02}) {  // by hashes; the second holds out the tail
    DataConfig d = config(WrittenTrees(groups).shard(), 64);
    d.validation_fraction = fraction;
    const Dataset data(d, 3);
    const int64_t rows = data.validation_rows(0, 0);
    ASSERT_GT(rows, 0);
    Weights held_out, trained;
    for (int64_t i = 0; i < rows; ++i) add_row(data, data.held_out(0, 0, i, rows), held_out);
    for (int64_t s = 0; data.epochs(0, s) < 1; ++s) add_row(data, data.drawn(s, 0), trained);
    Weights both = trained;
    both.insert(held_out.begin(), held_out.end());
    EXPECT_EQ(both, weights_of(groups));
    EXPECT_EQ(both.size(), trained.size() + held_out.size());
    for (const Group& group : groups) {  // a group has all its targets on one side
      Weights of = weights_of({group});
      size_t here = 0;
      for (const auto& [path, weight] : of) here += held_out.count(path);
      EXPECT_TRUE(here == 0 || here == of.size());
    }
  }
}

TEST_F(TreeRows, PartsAreCutWhereOthersGoOn) {
  // Tokens 0 to 9 are one branch; the second goes on behind input 2, the third behind 5 of the first, the fourth begins
  // a tree.
  EXPECT_EQ(row_parts({{0, 9}, {20, 3, 5}, {30, 2, 2}, {31, 1, -1}}, 20),
            (RowParts{{3, 3, 3, 3, 2, 1, 5}, {-1, 0, 1, 1, 0, -1, -1}}));
  expect_error(ErrorKind::kInput, {"the prefix tree", "is damaged"}, [] { row_parts({{0, 9}, {20, 3, 15}}, 20); });
}

TEST_F(TreeRows, RefusesRolloutsThatNoRowHolds) {
  Group group;
  for (const int64_t last : {7, 8})
    group.push_back({Ids(30, 5), std::vector<float>(30, 1)}), group.back().ids[29] = last;
  const std::string shard = WrittenTrees({group}).shard();
  expect_error(ErrorKind::kInput,
               {"the rollout that ends at " + root_ + "/a.tokens, token 29", "has 30 tokens from its prompt on",
                "a row takes 29", "lengthen data.context"},
               [&] { Dataset(config(shard, 28), 1); });
  EXPECT_EQ(Dataset(config(shard, 29), 1).drawn(0, 0).context, 29);
}

TEST_F(TreeRows, RefusesSettingsThatWouldMixRollouts) {
  DataConfig d = config(WrittenTrees(drawn_groups({1})).shard(), 64, "stream");
  d.documents = false;
  d.positions = "running";
  expect_error(ErrorKind::kInput,
               {"the source train", "holds prefix trees", "data.packing = \"best-fit\" (or \"document\")",
                "data.documents = true", "data.positions = \"restart\""},
               [&] { Dataset(d, 1); });
  put_file(root_ + "/b.tokens", shard_of_documents(drawn_groups({1})));
  d = config(WrittenTrees(drawn_groups({1})).shard(), 64);
  d.train = {root_ + "/a.tokens", root_ + "/b.tokens"};
  expect_error(ErrorKind::kInput, {"a.tokens holds prefix trees", "b.tokens documents", "two sources"},
               [&] { Dataset(d, 1); });
}

TEST_F(TreeRows, RefusesDamagedBranches) {
  const Documents documents = {{1, 2, 3, 4, 2, 5, 6}, {7, 8}};
  const std::vector<float> weights(9, 1);
  const auto write = [&](const std::vector<WrittenBranch>& branches) {
    put_file(root_ + "/a.tokens", annulus_shard(documents, 2, 256, std::string(16, '\x5a'), weights, branches));
    return TokenFile::open(root_ + "/a.tokens", {});
  };
  write({{0, kRoot}, {4, 0}, {7, kRoot}})->verify();
  const std::string damaged = "a.tokens was cut off or damaged: ";
  const auto refused = [&](const std::vector<WrittenBranch>& branches, const std::string& what) {
    expect_error(ErrorKind::kInput, {damaged, what}, [&] { write(branches)->verify(); });
  };
  refused({{1, kRoot}, {7, kRoot}}, "its branches do not cover its 9 tokens");
  refused({{0, kRoot}, {4, 5}, {7, kRoot}}, "branch 1 is where none may be");
  refused({{0, kRoot}, {4, 3}, {7, kRoot}}, "goes on behind token 3, which does not fit its tree");  // no input
  refused({{0, kRoot}, {4, 0}, {7, 5}}, "which does not fit its tree");              // of another document
  refused({{0, kRoot}, {4, 0}}, "which does not fit its tree");                      // goes on into another document
  refused({{0, kRoot}, {2, 0}, {4, 1}, {7, kRoot}}, "which does not fit its tree");  // passed already
  std::string cut = annulus_shard(documents, 2, 256, std::string(16, '\x5a'), weights, {{{0, kRoot}, {7, kRoot}}});
  cut.resize(cut.size() - 8);
  put_file(root_ + "/a.tokens", cut);
  expect_error(ErrorKind::kInput, {damaged}, [&] { TokenFile::open(root_ + "/a.tokens", {}); });
}

}  // namespace
}  // namespace annulus::tree_rows_test
