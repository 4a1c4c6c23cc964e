// Tests of targets that count in part: which targets of a row count and with which weight, whatever packs, cuts and
// divides the rows, and what a user is told of documents in which nothing counts. Ids are distinct, so that an id
// identifies a token.
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "attention/plan/layout.h"
#include "runtime/data/batch_reader.h"
#include "runtime/data/dataset.h"
#include "tests/runtime/data/shards/token_writers.h"
#include "tests/runtime/data/whole_rows.h"

namespace annulus::marked_targets_test {
namespace {

namespace fs = std::filesystem;

// Documents of drawn lengths up to 60, whose ids count up from 1; the weights by id, runs of 1 to 9.
struct MarkedCorpus {
  Documents documents;
  std::vector<float> weights;  // by token

  explicit MarkedCorpus(const std::vector<float>& values, uint32_t seed = 7) {
    const auto draw = [&](uint32_t below) {
      seed = seed * 1664525 + 1013904223;
      return (seed >> 16) % below;
    };
    int64_t id = 1;
    for (int i = 0; i < 120; ++i) {
      Ids& ids = documents.emplace_back();
      for (auto n = static_cast<int64_t>(draw(60)); n > 0; --n) ids.push_back(id++);
    }
    while (weights.size() + 1 < static_cast<size_t>(id)) {
      const float weight = values[draw(static_cast<uint32_t>(values.size()))];
      for (uint32_t n = 1 + draw(9); n > 0 && weights.size() + 1 < static_cast<size_t>(id); --n)
        weights.push_back(weight);
    }
  }
  float of(int64_t id) const { return weights[static_cast<size_t>(id - 1)]; }
};

class MarkedTargets : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = ::testing::TempDir() + "/marked";
    fs::remove_all(root_);
    fs::create_directories(root_);
  }

  DataConfig config(const MarkedCorpus& corpus, bool marked, const std::string& packing, bool documents) {
    const std::string path = root_ + (marked ? "/marked.tokens" : "/plain.tokens");
    put_file(path, annulus_shard(corpus.documents, 2, 10000, std::string(16, '\x5a'),
                                 marked ? std::optional(corpus.weights) : std::nullopt));
    DataConfig d;
    d.train = {path};
    d.context = 32;
    d.batch = 6;
    d.packing = packing;
    d.documents = documents;
    d.validation_fraction = 0.2;
    return d;
  }

  std::string root_;
};

const std::vector<float> kMask = {0, 1}, kWeights = {0, 0.1F, 1, 2.5F};

// The rows are those of the same shard without marks, and over an epoch each token that counts is a target once.
TEST_F(MarkedTargets, RowsAreThoseOfAShardWithoutMarks) {
  for (const std::vector<float>& values : {kMask, kWeights}) {
    const MarkedCorpus corpus(values);
    for (const std::string packing : {"stream", "best-fit", "document"}) {
      for (const bool documents : {false, true}) {
        const std::string what = packing + (documents ? ", documents apart" : "");
        const DataConfig marked = config(corpus, true, packing, documents);
        const DataConfig plain = config(corpus, false, packing, documents);
        const Dataset data(marked, 1), twin(plain, 1);
        const PackSettings settings = Dataset::pack_settings(marked, 32);
        const Corpus with(marked.train.list[0]), without(plain.train.list[0]);
        const auto rows = RowIndex::make(with, settings), twins = RowIndex::make(without, settings);
        EXPECT_NE(rows->digest(), twins->digest()) << "another mask is another corpus";
        std::map<int64_t, float> seen, expected;  // by target
        for (const Split split : {Split::kTrain, Split::kValidation}) {
          ASSERT_EQ(rows->rows(split), twins->rows(split)) << what;
          for (int64_t r = 0; r < rows->rows(split); ++r) {
            EXPECT_EQ(rows->row(split, r), twins->row(split, r)) << what;
            const DrawnRow row{.source = 0, .context = 32, .pieces = rows->row(split, r)};
            const Row all = whole(twin, row);
            std::vector<int64_t> tokens(32), targets(32);
            std::vector<float> weights(32, -1);
            data.read(row, {Span::range(0, 32)}, tokens.data(), targets.data(), weights.data());
            EXPECT_EQ(tokens, all.tokens) << what;
            for (size_t i = 0; i < 32; ++i) {
              const float weight = all.targets[i] == kNoTarget ? 0 : corpus.of(all.targets[i]);
              EXPECT_EQ(weights[i], weight) << what;
              EXPECT_EQ(targets[i], weight > 0 ? all.targets[i] : kNoTarget) << what;
              if (all.targets[i] != kNoTarget && weight > 0) expected[all.targets[i]] += weight;
              if (targets[i] != kNoTarget) seen[targets[i]] += weights[i];
            }
          }
        }
        EXPECT_EQ(seen, expected) << what;
        for (const auto& [target, weight] : seen) EXPECT_EQ(weight, corpus.of(target)) << what << ": once";
      }
    }
  }
}

// What ranks read of a batch, put together, is what one rank reads.
TEST_F(MarkedTargets, RanksReadTheirWeights) {
  const MarkedCorpus corpus(kWeights);
  for (const bool restart : {false, true}) {
    const Dataset data(config(corpus, true, "best-fit", true), 1);
    std::vector<DrawnRow> rows;
    for (int64_t r = 0; r < 6; ++r) rows.push_back(data.drawn(0, r));
    for (const LayoutKind layout : {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
      for (const int ranks : {1, 2, 4}) {
        int64_t counted = 0, expected = 0;
        double sum = 0, expected_sum = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          const BatchShape shape{.rows = 6,
                                 .own_rows = 6,
                                 .positions = make_layout(layout, 32, ranks).spans[static_cast<size_t>(rank)],
                                 .restart = restart,
                                 .weighs = true};
          EXPECT_EQ(shape.planes(), restart ? 4 : 3);
          std::vector<int64_t> memory(static_cast<size_t>(shape.values()));
          const Batch batch = fill_batch(data, shape, rows, memory.data());
          counted += batch.targets;
          sum += batch.weight;
          const auto* weights = reinterpret_cast<const float*>(memory.data() + (shape.planes() - 1) * shape.plane());
          const int64_t* targets = memory.data() + shape.plane();
          const std::vector<int64_t> positions = Layout{32, {shape.positions}}.positions(0);
          for (int64_t i = 0; i < shape.plane(); ++i) {
            const DrawnRow& row = rows[static_cast<size_t>(i / shape.length())];
            const int64_t target =
                whole(data, row).targets[static_cast<size_t>(positions[static_cast<size_t>(i % shape.length())])];
            EXPECT_EQ(targets[i], target);
            EXPECT_EQ(weights[i], target == kNoTarget ? 0 : corpus.of(target));
            expected += target == kNoTarget ? 0 : 1;
            expected_sum += target == kNoTarget ? 0 : static_cast<double>(corpus.of(target));
          }
        }
        EXPECT_EQ(counted, expected);
        EXPECT_GT(counted, 20);
        EXPECT_NEAR(sum, expected_sum, 1e-12 * expected_sum);
      }
    }
  }
}

// Ids that data.ignore names have no weight either.
TEST_F(MarkedTargets, IgnoredIdsHaveNoWeight) {
  const MarkedCorpus corpus({1, 2});
  DataConfig d = config(corpus, true, "stream", false);
  d.validation_fraction = 0;
  for (int64_t id = 1; id < 4000; id += 2) d.ignore.push_back(id);
  const Dataset data(d, 1);
  for (int64_t r = 0; r < 6; ++r) {
    std::vector<int64_t> tokens(32), targets(32);
    std::vector<float> weights(32);
    data.read(data.drawn(0, r), {Span::range(0, 32)}, tokens.data(), targets.data(), weights.data());
    for (size_t i = 0; i < 32; ++i) EXPECT_EQ(weights[i] > 0, targets[i] != kNoTarget);
  }
}

// Without weights other than 0 and 1 there is no plane of weights.
TEST_F(MarkedTargets, AMaskNeedsNoWeights) {
  const MarkedCorpus mask(kMask), weights(kWeights);
  EXPECT_FALSE(Dataset(config(mask, true, "stream", false), 1).weighs_targets());
  EXPECT_TRUE(Dataset(config(weights, true, "stream", false), 1).weighs_targets());
  EXPECT_FALSE(Dataset(config(weights, false, "stream", false), 1).weighs_targets());
}

TEST_F(MarkedTargets, WarnsOfDocumentsWithoutTargetsAndOfLongPrompts) {
  const std::string path = root_ + "/warned.tokens";
  // Only its first token, which nothing predicts; nothing; a prompt of 33 tokens; one of 32, which leaves the last
  // position of its row; an empty document.
  const Documents documents = {{1, 2, 3}, {4, 5}, Ids(40, 6), Ids(40, 7), {}};
  std::vector<float> weights = {1, 0, 0, 0, 0};
  for (const size_t prompt : {33U, 32U}) {
    for (size_t i = 0; i < 40; ++i) weights.push_back(i < prompt ? 0 : 1);
  }
  put_file(path, annulus_shard(documents, 2, 100, std::string(16, '\x5a'), weights));
  DataConfig d;
  d.train = {path};
  d.context = 32;
  d.batch = 1;
  d.packing = "best-fit";
  d.validation_fraction = 0;
  const std::vector<std::string> warnings = Dataset(d, 1).warnings();
  ASSERT_EQ(warnings.size(), 2U);
  EXPECT_NE(warnings[0].find("in 2 of 4 documents no token counts as a target"), std::string::npos) << warnings[0];
  EXPECT_NE(warnings[0].find("warned.tokens, token 0"), std::string::npos) << warnings[0];
  EXPECT_NE(warnings[1].find("in 1 document the prompt is longer than a row of 32 tokens"), std::string::npos)
      << warnings[1];
  EXPECT_NE(warnings[1].find("warned.tokens, token 5 "), std::string::npos) << warnings[1];
  d.context = 33;
  EXPECT_EQ(Dataset(d, 1).warnings().size(), 1U);
}

}  // namespace
}  // namespace annulus::marked_targets_test
