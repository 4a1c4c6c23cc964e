// Tests of runtime/data/dataset.h: which tokens a run trains on, in which order, and how a resume continues. Shards
// hold each id once (except the end of a document), so that an id identifies a token.
#include "runtime/data/dataset.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "common/error.h"
#include "tests/runtime/data/drawn_rows.h"
#include "tests/runtime/data/whole_rows.h"

namespace annulus::dataset_test {
namespace {

namespace fs = std::filesystem;

class DatasetTest : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = ::testing::TempDir() + "/dataset";
    fs::remove_all(root_);
    fs::create_directories(root_);
  }

  // Writes a shard of documents of these lengths, which include the end token; the other ids are first, first + 1, ...
  SourceConfig shard(const std::string& name, const std::vector<int64_t>& lengths, uint16_t first) {
    std::vector<uint16_t> tokens;
    for (const int64_t length : lengths) {
      for (int64_t i = 0; i + 1 < length; ++i) tokens.push_back(first++);
      tokens.push_back(kEnd);
    }
    const std::string path = root_ + "/" + name + ".bin";
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(tokens.data()), static_cast<std::streamsize>(2 * tokens.size()));
    return {.name = name, .files = {path}, .format = "nanogpt", .end = kEnd};
  }

  DataConfig data(std::vector<SourceConfig> sources, int64_t context, const std::string& packing = "stream",
                  bool documents = false) {
    DataConfig d;
    d.train = std::move(sources);
    d.context = context;
    d.batch = 3;
    d.packing = packing;
    d.documents = documents;
    d.validation_fraction = 0;
    return d;
  }

  std::string refusal(const DataConfig& d, int64_t vocab = 0) {
    try {
      const Dataset made(d, 1, vocab);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInput);
      return std::string(error.message());
    }
    return "";
  }

  std::string root_;
};

TEST_F(DatasetTest, EachTokenIsATargetOncePerEpoch) {
  const std::vector<int64_t> lengths = some_lengths(200, 3);
  const std::vector<SourceConfig> source = {shard("a", lengths, 1)};
  for (const std::string packing : {"stream", "best-fit", "document"}) {
    for (const bool documents : {false, true}) {
      const Dataset made(data(source, 32, packing, documents), 1);
      // An epoch may end within a step of three rows, so that a few tokens of the fourth epoch are counted as well.
      int64_t steps = 0;
      while (made.epochs(0, steps) < 3) ++steps;
      const std::map<int64_t, int64_t> counts = targets(made, 0, steps);
      std::set<int64_t> firsts;  // first tokens of documents, which nothing predicts
      int64_t id = 1;
      for (const int64_t length : lengths) {
        if (length > 1) firsts.insert(id);
        id += length - 1;
      }
      for (int64_t i = 1; i < id; ++i) {
        const auto found = counts.find(i);
        const int64_t count = found == counts.end() ? 0 : found->second;
        // If documents are not separated, the first token is predicted from the end of the previous document.
        const bool left_out = firsts.contains(i) && (documents || packing != "stream" || (i == 1 && lengths[0] > 1));
        if (left_out) {
          EXPECT_EQ(count, 0) << packing << ", token " << i;
        } else {
          EXPECT_TRUE(count == 3 || count == 4) << packing << ", token " << i << ": " << count;
        }
      }
    }
  }
}

TEST_F(DatasetTest, EachEpochHasItsOwnOrder) {
  const Dataset made(data({shard("a", std::vector<int64_t>(64, 33), 1)}, 32, "document"), 1);
  const auto order = [&](const Dataset& of, int64_t epoch) {
    std::vector<int64_t> firsts;
    for (int64_t draw = 64 * epoch; draw < 64 * (epoch + 1); ++draw)
      firsts.push_back(whole_row(of, draw / 3, draw % 3).tokens[0]);
    return firsts;
  };
  const std::vector<int64_t> first = order(made, 0), second = order(made, 1);
  EXPECT_FALSE(std::is_sorted(first.begin(), first.end()));
  EXPECT_NE(first, second);
  EXPECT_EQ(std::set<int64_t>(first.begin(), first.end()).size(), 64U);
  EXPECT_EQ(std::set<int64_t>(first.begin(), first.end()), std::set<int64_t>(second.begin(), second.end()));
  const DataConfig same = data({shard("a", std::vector<int64_t>(64, 33), 1)}, 32, "document");
  EXPECT_EQ(order(Dataset(same, 1), 0), first);
  EXPECT_NE(order(Dataset(same, 2), 0), first) << "the order depends on the seed";
}

TEST_F(DatasetTest, MixesSourcesByWeight) {
  SourceConfig a = shard("a", some_lengths(100, 1), 1), b = shard("b", some_lengths(40, 2), 20000);
  a.weight = 3;
  b.weight = 1;
  const Dataset made(data({a, b}, 16), 1);
  std::vector<int64_t> rows(2, 0);
  std::vector<SourceUse> used(2);
  for (int64_t step = 0; step < 40; ++step) {
    const std::vector<SourceUse> uses = made.uses(step);
    for (int64_t r = 0; r < 3; ++r) ++rows[made.drawn(step, r).source];
    for (size_t s = 0; s < 2; ++s) {
      used[s].add(uses[s]);
    }
  }
  EXPECT_EQ(rows, (std::vector<int64_t>{90, 30}));
  EXPECT_EQ(used[0].rows, 90);
  EXPECT_EQ(used[1].targets, 30 * 16) << "rows of a stream are full except the last of an epoch";
  // Within each source all tokens of an epoch are drawn before any is drawn again.
  std::map<int64_t, int64_t> counts;
  for (const auto& [id, count] : targets(made, 0, 40)) {
    const size_t source = id < 20000 ? 0 : 1;
    EXPECT_LE(count, static_cast<int64_t>(made.epochs(source, 40)) + 1) << id;
    EXPECT_GE(count, static_cast<int64_t>(made.epochs(source, 40))) << id;
  }
  // Without weights all sources finish their epochs at the same time.
  a.weight = b.weight = 0;
  const Dataset even(data({a, b}, 16), 1);
  for (const int64_t step : {10, 57}) EXPECT_NEAR(even.epochs(0, step), even.epochs(1, step), 0.05);
}

TEST_F(DatasetTest, ContextChangeNeitherSkipsNorRepeatsTokens) {
  const std::vector<int64_t> lengths = some_lengths(300, 5);
  for (const std::string packing : {"end to end", "stream", "best-fit", "document"}) {
    const bool apart = packing != "end to end";
    DataConfig d = data({shard("a", lengths, 1)}, 16, apart ? packing : "stream", apart);
    d.context.stages = {
        {.step = 0, .context = 16}, {.step = 30, .context = 64}, {.step = 40, .context = 24, .batch = 2}};
    const Dataset made(d, 1);
    EXPECT_EQ(made.context(29), 16);
    EXPECT_EQ(made.context(30), 64);
    EXPECT_EQ(made.rows(39), 3);
    EXPECT_EQ(made.rows(40), 2);
    int64_t steps = 41;
    while (made.epochs(0, steps) < 1) ++steps;
    // The last step may have started the next epoch.
    std::map<int64_t, int64_t> counts = targets(made, 0, steps - 1);
    for (const auto& [id, count] : counts) EXPECT_EQ(count, 1) << packing << ", token " << id;
    counts = targets(made, 0, steps);
    const auto units = lengths.begin() + (apart ? 300 : 1);  // first tokens of units are no targets
    EXPECT_EQ(static_cast<int64_t>(counts.size()),
              sum(lengths) - 300 - std::count_if(lengths.begin(), units, [](int64_t l) { return l > 1; }))
        << packing;
  }
}

TEST_F(DatasetTest, ResumeContinuesWithTheSameRows) {
  SourceConfig a = shard("a", some_lengths(100, 1), 1), b = shard("b", some_lengths(40, 2), 20000);
  a.weight = 0.7;
  b.weight = 0.3;
  DataConfig d = data({a, b}, 16, "best-fit", true);
  d.context.stages = {{.step = 0, .context = 16}, {.step = 20, .context = 32}};
  d.accumulate = 2;
  const Dataset straight(d, 1);
  for (const int64_t step : {1, 7, 20, 25}) {
    std::vector<SourceUse> uses(2);
    for (int64_t i = 0; i < step; ++i) {
      for (size_t s = 0; s < 2; ++s) uses[s].targets += straight.uses(i)[s].targets;
    }
    Dataset resumed(d, 1);
    EXPECT_TRUE(resumed.resume(straight.state(step, uses), step).empty()) << "nothing has changed";
    EXPECT_EQ(resumed.first_step(), step);
    EXPECT_EQ(resumed.resumed_uses(), uses);
    EXPECT_EQ(resumed.fingerprint(), straight.fingerprint());
    EXPECT_EQ(resumed.state(step + 1, uses), straight.state(step + 1, uses));
    for (int64_t next = step; next < step + 30; ++next) {
      for (int64_t r = 0; r < resumed.rows(next); ++r) {
        EXPECT_EQ(whole_row(resumed, next, r).tokens, whole_row(straight, next, r).tokens) << next;
      }
    }
  }
}

// Rows of a later stage can be left out before that stage begins.
TEST_F(DatasetTest, RowsLeftOutAreNotDrawn) {
  SourceConfig a = shard("a", some_lengths(200, 1), 1), b = shard("b", some_lengths(80, 2), 20000);
  a.weight = 0.7;
  b.weight = 0.3;
  for (const std::string packing : {"stream", "best-fit"}) {
    DataConfig d = data({a, b}, 16, packing, true);
    d.context.stages = {{.step = 0, .context = 16}, {.step = 20, .context = 24}};
    const auto tokens = [](const Dataset& of, int64_t step) {
      std::vector<std::vector<int64_t>> rows;
      for (int64_t r = 0; r < of.rows(step); ++r) rows.push_back(whole_row(of, step, r).tokens);
      return rows;
    };
    const Dataset all(d, 1);
    Dataset some(d, 1);
    some.leave_out(5);
    some.leave_out(5);  // also leaves out the rows that took their place
    some.leave_out(12);
    EXPECT_EQ(some.rows_left_out(), 9);
    for (int64_t step = 0; step < 17; ++step) {
      EXPECT_EQ(tokens(some, step), tokens(all, step < 5 ? step : step < 12 ? step + 2 : step + 3)) << step;
    }
    // The rows that the first stage drew in addition are not drawn in the second.
    for (const auto& [id, count] : targets(some, 0, 40)) EXPECT_EQ(count, 1) << packing << ", token " << id;
    some.leave_out(25);
    for (const int64_t step : {1, 8, 15, 22, 30}) {
      Dataset resumed(d, 1);
      EXPECT_TRUE(resumed.resume(some.state(step, std::vector<SourceUse>(2)), step).empty()) << "nothing has changed";
      EXPECT_EQ(resumed.fingerprint(), some.fingerprint());
      for (int64_t next = step; next < 35; ++next) EXPECT_EQ(tokens(resumed, next), tokens(some, next)) << next;
    }
    // If a stage is removed, the rows left out of it are forgotten.
    d.context.stages.pop_back();
    Dataset shorter(d, 1);
    const std::vector<std::string> told = shorter.resume(some.state(15, std::vector<SourceUse>(2)), 15);
    ASSERT_EQ(told.size(), 1U);
    EXPECT_NE(told[0].find("left out after a spike"), std::string::npos) << told[0];
    EXPECT_EQ(shorter.rows_left_out(), 9);
  }
}

TEST_F(DatasetTest, ResumeWithAnotherContextUsesTheUnseenTokens) {
  const std::vector<int64_t> lengths = some_lengths(300, 7);
  const std::vector<SourceConfig> source = {shard("a", lengths, 1)};
  const Dataset before(data(source, 16, "stream", true), 1);
  Dataset after(data(source, 40, "best-fit", true), 1);
  const std::vector<std::string> told = after.resume(before.state(50, {{}}), 50);
  ASSERT_EQ(told.size(), 1U);
  EXPECT_NE(told[0].find("step 51"), std::string::npos) << told[0];
  std::map<int64_t, int64_t> counts = targets(before, 0, 50);
  int64_t steps = 50;
  while (after.epochs(0, steps + 1) <= 1) ++steps;
  for (const auto& [id, count] : targets(after, 50, steps)) counts[id] += count;
  for (const auto& [id, count] : counts) EXPECT_EQ(count, 1) << id;
  // A second resume still takes account of everything drawn since the beginning.
  Dataset third(data(source, 24, "stream", true), 1);
  third.resume(after.state(60, {{}}), 60);
  counts = targets(before, 0, 50);
  for (const auto& [id, count] : targets(after, 50, 60)) counts[id] += count;
  steps = 60;
  while (third.epochs(0, steps + 1) <= 1) ++steps;
  for (const auto& [id, count] : targets(third, 60, steps)) counts[id] += count;
  for (const auto& [id, count] : counts) EXPECT_EQ(count, 1) << id;
}

TEST_F(DatasetTest, ResumeWithAnotherSeedKeepsTheOrder) {
  const DataConfig d = data({shard("a", some_lengths(100, 1), 1)}, 16);
  const Dataset before(d, 1);
  Dataset after(d, 2, 0, /*resumes=*/true);
  const std::vector<std::string> told = after.resume(before.state(10, {{}}), 10);
  ASSERT_EQ(told.size(), 1U);
  EXPECT_NE(told[0].find("run.seed = 1"), std::string::npos) << told[0];
  for (int64_t step = 10; step < 30; ++step)
    EXPECT_EQ(whole_row(after, step, 1).tokens, whole_row(before, step, 1).tokens);
  EXPECT_EQ(after.state(20, {{}}), before.state(20, {{}})) << "later states record the old seed as well";
}

TEST_F(DatasetTest, RefusesToResumeATokenRunOnBytes) {
  const Dataset ids(data({shard("a", some_lengths(100, 1), 1)}, 16), 1);
  std::ofstream(root_ + "/text.txt") << std::string(1000, 'x');
  const DataConfig d = data({{.files = {root_ + "/text.txt"}}}, 16);
  const Dataset bytes(d, 1);
  Dataset resumed(d, 1);
  EXPECT_THROW(resumed.resume(ids.state(10, {{}}), 10), Error);
  Dataset other(data({shard("a", some_lengths(100, 1), 1)}, 16), 1);
  EXPECT_THROW(other.resume(bytes.state(10, {{}}), 10), Error);
}

TEST_F(DatasetTest, CountsContinueForAReturningSource) {
  SourceConfig a = shard("a", some_lengths(100, 1), 1), b = shard("b", some_lengths(40, 2), 20000);
  const Dataset both(data({a, b}, 16), 1);
  Dataset without(data({a}, 16), 1);
  without.resume(both.state(10, {{.rows = 20}, {.rows = 10, .targets = 99}}), 10);
  Dataset again(data({b, a}, 16), 1);
  again.resume(without.state(20, {{.rows = 50}}), 20);
  EXPECT_EQ(again.resumed_uses()[0], (SourceUse{.rows = 10, .targets = 99}));
  EXPECT_EQ(again.resumed_uses()[1].rows, 50);
}

TEST_F(DatasetTest, IgnoresSettingsThatChangeNoRow) {
  const DataConfig d = data({shard("a", some_lengths(100, 1), 1)}, 16, "best-fit", true);
  DataConfig same = d;
  same.documents = false;  // best-fit packing always separates documents
  const Dataset before(d, 1);
  Dataset after(same, 1);
  EXPECT_TRUE(after.resume(before.state(10, {{}}), 10).empty());
  EXPECT_EQ(whole_row(after, 11, 0).tokens, whole_row(before, 11, 0).tokens);
}

TEST_F(DatasetTest, WarnsIfNoDocumentsAreFound) {
  SourceConfig a = shard("a", {300}, 1);
  EXPECT_TRUE(Dataset(data({a}, 16, "stream", false), 1).warnings().empty());
  a.end = 55555;
  EXPECT_TRUE(Dataset(data({a}, 16, "stream", false), 1).warnings().empty()) << "documents do not matter";
  for (const bool documents : {false, true}) {
    DataConfig d = data({a}, 16, "stream", documents);
    d.positions = "restart";
    const std::vector<std::string> warnings = Dataset(d, 1).warnings();
    ASSERT_EQ(warnings.size(), 1U);
    for (const std::string word : {"source a", "1 document", "55555", "end = ID"}) {
      EXPECT_NE(warnings[0].find(word), std::string::npos) << word << " not in: " << warnings[0];
    }
  }
  EXPECT_EQ(Dataset(data({a}, 16, "stream", true), 1).warnings().size(), 1U);
  EXPECT_TRUE(Dataset(data({shard("b", some_lengths(50, 3), 1)}, 16, "stream", true), 1).warnings().empty());
}

TEST_F(DatasetTest, SeparatingDocumentsStartsTheNextEpoch) {
  const std::vector<SourceConfig> source = {shard("a", some_lengths(300, 7), 1)};
  const Dataset before(data(source, 16, "stream", false), 1);
  Dataset after(data(source, 16, "best-fit", true), 1);
  const std::vector<std::string> told = after.resume(before.state(50, {{}}), 50);
  ASSERT_EQ(told.size(), 1U);
  EXPECT_NE(told[0].find("next epoch"), std::string::npos) << told[0];
  EXPECT_DOUBLE_EQ(after.epochs(0, 50), 1);
  for (const auto& [id, count] : targets(after, 50, 60)) EXPECT_EQ(count, 1) << id;
}

TEST_F(DatasetTest, ResumeReportsAddedAndRemovedSources) {
  SourceConfig a = shard("a", some_lengths(100, 1), 1), b = shard("b", some_lengths(40, 2), 20000),
               c = shard("c", some_lengths(50, 4), 40000);
  a.weight = b.weight = c.weight = 1;
  const Dataset before(data({a, b}, 16), 1);
  const std::string state = before.state(10, std::vector<SourceUse>(2));
  Dataset after(data({c, a}, 16), 1);
  std::string told;
  for (const std::string& line : after.resume(state, 10)) told += line + "\n";
  EXPECT_NE(told.find("source b was changed or removed"), std::string::npos) << told;
  EXPECT_NE(told.find("source c has not been trained on"), std::string::npos) << told;
  EXPECT_EQ(told.find("source a"), std::string::npos) << told;
  // Rows already drawn from `a` are not drawn again.
  std::map<int64_t, int64_t> counts;
  for (const auto& [id, count] : targets(before, 0, 10)) {
    if (id < 20000) counts[id] += count;
  }
  for (const auto& [id, count] : targets(after, 10, 40)) {
    if (id < 20000) counts[id] += count;
  }
  ASSERT_LT(after.epochs(1, 40), 1);
  for (const auto& [id, count] : counts) EXPECT_EQ(count, 1) << id;
  // Changed weights are reported.
  b.weight = 3;
  Dataset weighted(data({a, b}, 16), 1);
  told = weighted.resume(state, 10)[0];
  EXPECT_NE(told.find("source a gives 25 % of the rows (it gave 50 %)"), std::string::npos) << told;
}

TEST_F(DatasetTest, RefusesInvalidStates) {
  const std::vector<SourceConfig> source = {shard("a", some_lengths(100, 1), 1)};
  const DataConfig d = data(source, 16);
  const Dataset before(d, 1);
  const std::string good = before.state(10, {{}});
  for (const std::string& state :
       {std::string("{"), std::string("[]"), std::string("{\"version\":1}"), std::string("{\"version\":2}"),
        good.substr(0, good.size() / 2), std::string(good).replace(good.find("\"rows\":3"), 8, "\"rows\":0"),
        std::string(good).replace(good.find("\"context\":16"), 12, "\"context\":0")}) {
    Dataset after(d, 1);
    EXPECT_THROW(after.resume(state, 10), Error) << state;
  }
  Dataset after(d, 1);
  EXPECT_EQ(after.resume("", 10).size(), 1U) << "an empty state is that of a run that drew rows at random";
  EXPECT_EQ(whole_row(after, 10, 0).tokens.size(), 16U);
  Dataset again(d, 1);
  again.resume(after.state(20, {{}}), 20);
  EXPECT_EQ(whole_row(again, 20, 1).tokens, whole_row(after, 20, 1).tokens);
}

TEST_F(DatasetTest, HoldsDocumentsOutForValidation) {
  const std::vector<int64_t> lengths = some_lengths(400, 9);
  DataConfig d = data({shard("a", lengths, 1)}, 32, "best-fit", true);
  d.validation_fraction = 0.2;
  const Dataset made(d, 1);
  ASSERT_TRUE(made.has_validation());
  const int64_t rows = made.validation_rows(0, 0);
  ASSERT_GT(rows, 20);
  std::set<int64_t> held;
  for (int64_t i = 0; i < rows; ++i) {
    const Row row = whole(made, made.held_out(0, 0, i, rows));
    EXPECT_EQ(made.held_out(0, 0, i, rows).parts().lengths, parts_by_tokens(row));
    for (const int64_t id : row.targets) {
      if (id == kNoTarget || id == kEnd) continue;
      EXPECT_TRUE(held.insert(id).second) << id;
    }
  }
  int64_t steps = 0;
  while (made.epochs(0, steps) < 1) ++steps;
  for (const auto& [id, count] : targets(made, 0, steps)) EXPECT_FALSE(held.contains(id)) << id;
  // If more rows are requested than exist, the rest have no target.
  for (int64_t i = 0; i < 2 * rows; ++i) {
    const Row row = whole(made, made.held_out(0, 0, i, 2 * rows));
    const bool any = std::any_of(row.targets.begin(), row.targets.end(), [](int64_t t) { return t != kNoTarget; });
    EXPECT_EQ(any, i < rows);
  }
  // If fewer rows are requested, they are spread over all.
  EXPECT_EQ(whole(made, made.held_out(0, 0, 1, 2)).tokens, whole(made, made.held_out(0, 0, rows / 2, rows)).tokens);
}

TEST_F(DatasetTest, IgnoredIdsAreNotTargets) {
  DataConfig d = data({shard("a", {20, 30, 40}, 1)}, 8, "stream", false);
  d.ignore = {kEnd, 7};
  const Dataset made(d, 1);
  int64_t ignored = 0;
  for (int64_t step = 0; made.epochs(0, step) < 1; ++step) {
    for (int64_t r = 0; r < 3; ++r) {
      const Row row = whole_row(made, step, r);
      for (size_t i = 0; i < row.targets.size(); ++i) {
        EXPECT_NE(row.targets[i], kEnd);
        EXPECT_NE(row.targets[i], 7);
        if (row.tokens[i] == 6) ignored += row.targets[i] == kNoTarget ? 1 : 0;
      }
    }
  }
  EXPECT_GE(ignored, 1);
}

TEST_F(DatasetTest, RefusesUnusableSources) {
  const SourceConfig a = shard("a", {20, 30, 40}, 1);
  const auto expect = [&](const DataConfig& d, int64_t vocab, const std::vector<std::string>& words) {
    const std::string said = refusal(d, vocab);
    for (const std::string& word : words) EXPECT_NE(said.find(word), std::string::npos) << word << " not in: " << said;
  };
  SourceConfig twice = a;
  twice.name = "again";
  expect(data({a, twice}, 8), 0, {"a", "again", "same tokens"});
  expect(data({a}, 100), 0, {"a.bin", "90", "100", "data.context"});
  DataConfig limited = data({a}, 8);
  limited.max_bytes = 5;
  expect(limited, 0, {"data.max_bytes", "a.bin"});
  std::ofstream(root_ + "/text.txt") << std::string(1000, 'x');
  expect(data({{.files = {root_ + "/text.txt"}}}, 8), 200, {"255", "model.vocab is 200", "model.vocab=256"});
  expect(data({a, {.name = "t", .files = {root_ + "/text.txt"}}}, 8), 0, {"t: ", "text.txt", "is text", "source a"});
  DataConfig refused = data({a}, 8, "best-fit");
  refused.long_documents = "refuse";
  expect(refused, 0, {"20", "8"});
}

TEST_F(DatasetTest, ErrorLocatesAnIdBeyondTheVocabulary) {
  const Dataset made(data({shard("a", {20, 30, 40}, 1)}, 8), 1, 50);
  std::string said;
  for (int64_t step = 0; said.empty() && step < 10; ++step) {
    for (int64_t r = 0; r < 3; ++r) {
      try {
        whole_row(made, step, r);
      } catch (const Error& error) {
        said = error.message();
      }
    }
  }
  for (const std::string word : {"a.bin", "token", "model.vocab = 50"}) {
    EXPECT_NE(said.find(word), std::string::npos) << word << " not in: " << said;
  }
}

}  // namespace
}  // namespace annulus::dataset_test
