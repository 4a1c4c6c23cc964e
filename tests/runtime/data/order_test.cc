// Tests of runtime/data/order.h: the order in which a source's rows are drawn, also across changes of the context.
#include "runtime/data/order.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

#include "common/error.h"
#include "tests/common/expect_error.h"
#include "tests/runtime/data/shards/token_writers.h"

namespace annulus::order_test {
namespace {

namespace fs = std::filesystem;

class OrderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = ::testing::TempDir() + "order";
    fs::remove_all(root_);
    fs::create_directories(root_);
  }

  Corpus corpus(const Documents& documents) {
    put_file(root_ + "/c.tokens", annulus_shard(documents, 4, 1 << 30));
    SourceConfig source;
    source.files = {root_ + "/c.tokens"};
    return Corpus(source);
  }

  std::string root_;
};

Documents drawn_documents(std::mt19937_64& random, size_t count) {
  Documents documents(count);
  int64_t id = 0;
  for (Ids& ids : documents) {
    const uint64_t most[] = {1, 2, 10, 100};
    ids.resize(random() % most[random() % 4]);
    for (int64_t& token : ids) token = id++;
  }
  return documents;
}

std::shared_ptr<const RowIndex> rows(const Corpus& corpus, int64_t context, Packing packing, bool documents,
                                     double validation = 0) {
  return RowIndex::make(corpus, {context, packing, documents, validation, false});
}

// Counts the targets of row `draw` by token.
void count(const SourceOrder& order, int64_t draw, std::map<int64_t, int>& targets) {
  const SourceOrder::Drawn drawn = order.at(draw);
  for (const Piece& piece : drawn.index->row(Split::kTrain, drawn.row)) {
    for (int64_t i = 1; i <= piece.count; ++i) ++targets[piece.token + i];
  }
}

std::map<int64_t, int> targets_of(const RowIndex& index) {
  std::map<int64_t, int> targets;
  for (int64_t r = 0; r < index.rows(Split::kTrain); ++r) {
    for (const Piece& piece : index.row(Split::kTrain, r)) {
      for (int64_t i = 1; i <= piece.count; ++i) ++targets[piece.token + i];
    }
  }
  return targets;
}

TEST_F(OrderTest, EachEpochDrawsEachRowOnceInItsOwnOrder) {
  std::mt19937_64 random(1);
  const Corpus source = corpus(drawn_documents(random, 200));
  const auto index = rows(source, 8, Packing::kBestFit, true);
  const int64_t n = index->rows(Split::kTrain);
  std::set<std::vector<int64_t>> orders;
  const auto order_of = [&](const SourceOrder& order, int64_t epoch) {
    std::vector<int64_t> drawn;
    for (int64_t i = 0; i < n; ++i) {
      EXPECT_EQ(order.at(epoch * n + i).epoch, epoch);
      drawn.push_back(order.at(epoch * n + i).row);
    }
    EXPECT_EQ(std::set<int64_t>(drawn.begin(), drawn.end()).size(), static_cast<size_t>(n));
    return drawn;
  };
  for (const int64_t seed : {1, 2}) {
    for (const std::string name : {"web", "books"}) {
      const SourceOrder order(seed, name, index);
      for (const int64_t epoch : {0, 1, 5}) orders.insert(order_of(order, epoch));
      EXPECT_EQ(order_of(order, 1), order_of(SourceOrder(seed, name, index), 1));
    }
  }
  EXPECT_EQ(orders.size(), 12u);
  const SourceOrder order(1, "web", index);
  EXPECT_EQ(order.epochs(0), 0);
  EXPECT_EQ(order.epochs(n), 1);
  EXPECT_DOUBLE_EQ(order.epochs(n * 3 + n / 2), 3 + static_cast<double>(n / 2) / static_cast<double>(n));
}

TEST_F(OrderTest, RefusesASourceWithoutRows) {
  const Corpus source = corpus({{1}, {2}, {}});
  expect_error(ErrorKind::kInput, {"no row to train on"},
               [&] { SourceOrder(1, "web", rows(source, 8, Packing::kDocument, true)); });
}

// The context changes twice, each time at a random draw: in the first epoch, in what remains of it, or in a later one.
TEST_F(OrderTest, EachTokenIsATargetOncePerEpochAcrossContextChanges) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 60; ++round) {
    const auto packing = static_cast<Packing>(round % 3);
    const bool documents = round % 2 == 0;
    const double validation = round % 5 == 0 ? 0.2 : 0;
    const Corpus source = corpus(drawn_documents(random, 30 + random() % 100));
    const auto index_of = [&](int64_t context) { return rows(source, context, packing, documents, validation); };
    const int64_t contexts[] = {static_cast<int64_t>(random() % 30 + 1), static_cast<int64_t>(random() % 30 + 1),
                                static_cast<int64_t>(random() % 30 + 1)};
    const auto first = index_of(contexts[0]);
    if (first->rows(Split::kTrain) == 0) continue;
    const std::map<int64_t, int> once = targets_of(*first);
    const std::string folder = round % 4 == 0 ? root_ : "";
    SourceOrder order(3, "web", first);
    const auto rows_of_epoch = static_cast<uint64_t>(first->rows(Split::kTrain));
    const auto change_1 = static_cast<int64_t>(random() % (2 * rows_of_epoch));
    order.change(change_1, index_of(contexts[1]), folder);
    const auto change_2 = change_1 + static_cast<int64_t>(random() % (rows_of_epoch + 3));
    order.change(change_2, index_of(contexts[2]), folder);
    int64_t draw = 0;
    double epochs = 0;
    for (int epoch = 0; epoch < 4; ++epoch) {
      std::map<int64_t, int> targets;
      for (; order.at(draw).epoch == epoch; ++draw) {
        count(order, draw, targets);
        EXPECT_EQ(order.at(draw).index->settings().context, contexts[draw < change_1 ? 0 : draw < change_2 ? 1 : 2]);
        EXPECT_GE(order.epochs(draw), epochs);
        epochs = order.epochs(draw);
        EXPECT_LT(epochs, epoch + 1);
      }
      EXPECT_EQ(order.at(draw).epoch, epoch + 1);
      EXPECT_EQ(targets, once) << "round " << round << " epoch " << epoch << ": " << packing_name(packing) << " "
                               << contexts[0] << " " << change_1 << " " << contexts[1] << " " << change_2 << " "
                               << contexts[2];
    }
  }
}

TEST_F(OrderTest, ChangeDiscardsLaterChangesAndIsRepeatable) {
  std::mt19937_64 random(4);
  const Corpus source = corpus(drawn_documents(random, 100));
  const auto index = [&](int64_t context) { return rows(source, context, Packing::kBestFit, true); };
  const auto drawn = [](const SourceOrder& order) {
    std::vector<std::vector<Piece>> all;
    for (int64_t i = 0; i < 200; ++i) all.push_back(order.at(i).index->row(Split::kTrain, order.at(i).row));
    return all;
  };
  SourceOrder changed(1, "web", index(8));
  changed.change(10, index(20));
  SourceOrder detour(1, "web", index(8));
  detour.change(5, index(3));
  detour.change(30, index(4));
  EXPECT_NE(drawn(detour), drawn(changed));
  SourceOrder again(1, "web", index(8));
  again.change(10, index(5));
  again.change(15, index(6));
  again.change(10, index(20), root_);
  // The rest of the epoch has the same targets, whatever changes were made and discarded before.
  std::map<int64_t, int> targets, expected;
  for (int64_t i = 0; again.at(i).epoch == 0; ++i) count(again, i, targets);
  for (int64_t i = 0; changed.at(i).epoch == 0; ++i) count(changed, i, expected);
  EXPECT_EQ(targets, expected);
  SourceOrder same(1, "web", index(8));
  same.change(10, index(20), root_);
  EXPECT_EQ(drawn(same), drawn(changed));
}

TEST_F(OrderTest, IndexOfRemainingRowsIsFoundAgain) {
  std::mt19937_64 random(6);
  const Corpus source = corpus(drawn_documents(random, 100));
  const auto index = rows(source, 8, Packing::kBestFit, true);
  const PackSettings longer{32, Packing::kBestFit, true, 0, false};
  const auto path = [&](const RowsLeft& left) { return RowIndex::remaining(*index, left, longer, root_)->path(); };
  EXPECT_EQ(path({5, 10}), path({5, 10}));
  EXPECT_NE(path({5, 10}), path({5, 11}));
  EXPECT_NE(path({5, 10}), path({6, 10}));
  RowIndex::remaining(*index, {5, 10}, longer, root_)->verify();
}

TEST_F(OrderTest, SeparatingDocumentsStartsTheNextEpoch) {
  std::mt19937_64 random(7);
  const Corpus source = corpus(drawn_documents(random, 50));
  SourceOrder order(1, "web", rows(source, 8, Packing::kStream, false));
  const auto apart = rows(source, 8, Packing::kBestFit, true);
  order.change(3, apart);
  EXPECT_EQ(order.at(2).epoch, 0);
  EXPECT_EQ(order.at(3).epoch, 1);
  EXPECT_EQ(order.at(3).index, apart.get());
  EXPECT_DOUBLE_EQ(order.epochs(3), 1);
  // If nothing of the epoch has been drawn yet, the same epoch begins.
  SourceOrder fresh(1, "web", rows(source, 8, Packing::kStream, false));
  fresh.change(0, apart);
  EXPECT_EQ(fresh.at(0).epoch, 0);
}

}  // namespace
}  // namespace annulus::order_test
