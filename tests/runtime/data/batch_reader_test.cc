// Tests of runtime/data/batch_reader.h: each rank's share of the rows, reading ahead, and errors.
#include "runtime/data/batch_reader.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <thread>

#include "attention/pattern/span.h"
#include "attention/plan/layout.h"
#include "common/error.h"
#include "tests/runtime/data/whole_rows.h"

namespace annulus::batch_reader_test {
namespace {

// Writes 40 documents of 7, 8, ... bytes; returns their glob pattern.
std::vector<std::string> write_texts() {
  const std::string root = ::testing::TempDir() + "/batches";
  std::filesystem::remove_all(root);
  std::filesystem::create_directories(root);
  char c = 0;
  for (int64_t i = 0; i < 40; ++i) {
    std::string text;
    for (int64_t j = 0; j < 7 + i; ++j) text += c++;
    std::ofstream(root + "/" + std::to_string(100 + i), std::ios::binary) << text;
  }
  return {root + "/*"};
}

constexpr LayoutKind kLayouts[] = {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped};

DataConfig config() {
  DataConfig d;
  d.train = write_texts();
  d.context = 24;
  d.documents = true;
  d.validation_fraction = 0;
  d.batch = 42;
  return d;
}

// What all ranks of a grid of `rows` x `context` read at step `step`, assembled: the values of the three planes by row
// and position.
std::map<std::pair<int64_t, int64_t>, std::vector<int64_t>> put_together(const Dataset& data, int64_t step,
                                                                         int64_t rows, int context, LayoutKind layout) {
  std::map<std::pair<int64_t, int64_t>, std::vector<int64_t>> all;
  int64_t targets = 0;
  for (int64_t d = 0; d < rows; ++d) {
    for (int c = 0; c < context; ++c) {
      const BatchShape shape{.rows = 42,
                             .first_row = d * 42 / rows,
                             .own_rows = 42 / rows,
                             .positions = make_layout(layout, 24, context).spans[static_cast<size_t>(c)],
                             .restart = true};
      const std::vector<int64_t> positions = Layout{24, {shape.positions}}.positions(0);
      std::vector<std::vector<int64_t>> memory(3, std::vector<int64_t>(static_cast<size_t>(shape.values())));
      std::vector<int64_t*> slots;
      for (std::vector<int64_t>& slot : memory) slots.push_back(slot.data());
      BatchReader reader(data, shape, 1, step, step + 1, slots);
      const BatchReader::Step& read = reader.take();
      targets += read.batches[0].targets;
      EXPECT_EQ(read.batches[0].rows.size(), static_cast<size_t>(shape.own_rows));
      const std::vector<int64_t>& values = memory[read.slot];
      for (int64_t i = 0; i < shape.plane(); ++i) {
        auto& at = all[{shape.first_row + i / shape.length(), positions[static_cast<size_t>(i % shape.length())]}];
        for (int64_t plane = 0; plane < 3; ++plane)
          at.push_back(values[static_cast<size_t>(plane * shape.plane() + i)]);
      }
    }
  }
  int64_t whole = 0;
  for (int64_t r = 0; r < 42; ++r) {
    for (const int64_t target : whole_row(data, step, r).targets) whole += target != kNoTarget ? 1 : 0;
  }
  EXPECT_EQ(targets, whole);
  return all;
}

TEST(BatchReader, GivesEachRankItsShareOfTheSameRows) {
  const Dataset data(config(), 1);
  for (const int64_t step : {0, 3}) {
    const auto one = put_together(data, step, 1, 1, LayoutKind::kContiguous);
    ASSERT_EQ(one.size(), 42U * 24U);
    for (const auto& [place, planes] : one) {
      const Row row = whole_row(data, step, place.first);
      EXPECT_EQ(planes[0], row.tokens[static_cast<size_t>(place.second)]);
      EXPECT_EQ(planes[1], row.targets[static_cast<size_t>(place.second)]);
      int64_t begin = 0;
      for (const int64_t part : data.drawn(step, place.first).parts().lengths) {
        if (place.second < begin + part) break;
        begin += part;
      }
      EXPECT_EQ(planes[2], place.second - begin) << "positions restart with every document";
    }
    for (const int64_t rows : {1, 2, 3, 7}) {
      for (const int context : {1, 2, 3, 7}) {
        for (const LayoutKind layout : kLayouts) EXPECT_EQ(put_together(data, step, rows, context, layout), one);
      }
    }
  }
}

// A layout that follows the documents gives each batch its own positions, and with them running rotary positions.
TEST(BatchReader, ReadsEachBatchAtItsOwnPositions) {
  const Dataset data(config(), 1);
  const auto place = [](const std::vector<DrawnRow>& own) {
    return own[0].parts().lengths[0] % 2 == 0 ? std::vector<Span>{{0, 1, 2}, {20, 1, 4}} : std::vector<Span>{{5, 1, 6}};
  };
  BatchShape shape{.rows = 42, .first_row = 7, .own_rows = 2, .positions = {{0, 1, 6}}, .place = place};
  EXPECT_EQ(shape.planes(), 3);
  std::vector<int64_t> values(static_cast<size_t>(shape.values()));
  std::set<int64_t> begins;
  for (int64_t step = 0; step < 6; ++step) {
    BatchReader reader(data, shape, 1, step, step + 1, {values.data()});
    const Batch& batch = reader.take().batches[0];
    const std::vector<int64_t> positions = Layout{24, {place(batch.rows)}}.positions(0);
    begins.insert(positions[0]);
    for (int64_t i = 0; i < shape.plane(); ++i) {
      const Row row = whole_row(data, step, 7 + i / 6);
      const auto at = static_cast<size_t>(positions[static_cast<size_t>(i % 6)]);
      EXPECT_EQ(values[static_cast<size_t>(i)], row.tokens[at]);
      EXPECT_EQ(values[static_cast<size_t>(shape.plane() + i)], row.targets[at]);
      EXPECT_EQ(values[static_cast<size_t>(2 * shape.plane() + i)], static_cast<int64_t>(at));
    }
  }
  EXPECT_EQ(begins.size(), 2U) << "the batches have different documents";
  shape.place = [](const std::vector<DrawnRow>&) { return std::vector<Span>{{0, 1, 5}}; };
  BatchReader reader(data, shape, 1, 0, 1, {values.data()});
  EXPECT_THROW(reader.take(), Error);
}

// A rank reads the token of each of its positions and, where the next position is not its own or lies in another
// document, also the target.
TEST(BatchReader, RanksReadOnlyTheirOwnPositions) {
  constexpr int64_t kContext = 512, kRows = 4;
  DataConfig d = config();
  d.context = kContext;
  d.batch = kRows;
  for (const std::string packing : {"stream", "best-fit", "document"}) {
    d.packing = packing;
    const Dataset data(d, 1, 256);
    std::vector<DrawnRow> rows;
    int64_t documents = 0;
    for (int64_t row = 0; row < kRows; ++row) {
      rows.push_back(data.drawn(0, row));
      documents += rows.back().use().documents;
    }
    for (const int ranks : {1, 4, 8}) {
      for (const LayoutKind layout : kLayouts) {
        int64_t targets = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          const std::vector<Span> own = make_layout(layout, kContext, ranks).spans[static_cast<size_t>(rank)];
          const BatchShape shape{.rows = kRows, .own_rows = kRows, .positions = own};
          std::vector<int64_t> memory(static_cast<size_t>(shape.values()));
          const int64_t before = data.tokens_read();
          const Batch batch = fill_batch(data, shape, rows, memory.data());
          const int64_t read = data.tokens_read() - before;
          const std::string what = packing + ", rank " + std::to_string(rank) + " of " + std::to_string(ranks);
          EXPECT_GE(read, batch.targets) << what;
          EXPECT_LE(read, 2 * batch.targets) << what;
          if (layout != LayoutKind::kStriped || ranks == 1) {
            EXPECT_LE(read, batch.targets + documents + kRows * static_cast<int64_t>(own.size())) << what;
          }
          targets += batch.targets;
        }
        int64_t held = 0;
        for (const DrawnRow& row : rows) held += row.use().targets;
        EXPECT_EQ(targets, held) << packing;
      }
    }
  }
}

TEST(BatchReader, ReadAheadDoesNotTouchTheSlotInUse) {
  DataConfig d = config();
  d.batch = 2;
  d.accumulate = 3;
  const Dataset data(d, 1);
  BatchShape shape{.rows = 2, .first_row = 0, .own_rows = 2, .positions = {{0, 5, 2}, {23, 1, 1}}, .restart = false};
  std::vector<std::vector<int64_t>> memory(3, std::vector<int64_t>(static_cast<size_t>(3 * shape.values())));
  BatchReader reader(data, shape, 3, 4, 40, {memory[0].data(), memory[1].data(), memory[2].data()});
  for (int64_t step = 4; step < 40; ++step) {
    const BatchReader::Step& read = reader.take();
    ASSERT_EQ(read.batches.size(), 3U);
    const std::vector<int64_t> values = memory[read.slot];
    std::this_thread::yield();
    EXPECT_EQ(values, memory[read.slot]);
    int64_t rows = 0;
    for (const SourceUse& use : read.uses) rows += use.rows;
    EXPECT_EQ(rows, 6);
    for (int64_t i = 0; i < 3; ++i) {
      for (int64_t r = 0; r < 2; ++r) {
        const Row row = whole_row(data, step, 2 * i + r);
        const auto at = static_cast<size_t>(i * shape.values() + r * 3);
        EXPECT_EQ(values[at], row.tokens[0]);
        EXPECT_EQ(values[at + 2], row.tokens[23]);
        EXPECT_EQ(values[at + static_cast<size_t>(shape.plane()) + 1], row.targets[5]);
      }
    }
  }
  EXPECT_THROW(reader.take(), Error);
  EXPECT_GE(reader.waited(), 0);
}

TEST(BatchReader, ErrorIsThrownByTheTakeOfItsStep) {
  const Dataset data(config(), 1, 256);
  const std::string root = ::testing::TempDir() + "/batches";
  BatchShape shape{.rows = 42, .first_row = 0, .own_rows = 42, .positions = {{0, 1, 1}}, .restart = false};
  std::vector<int64_t> a(static_cast<size_t>(shape.values()));
  BatchReader reader(data, shape, 1, 0, 100, {a.data()});
  reader.take();
  // There is one slot, so that nothing more is read until the next take() returns it.
  for (const auto& file : std::filesystem::directory_iterator(root)) {
    std::ofstream(file.path(), std::ios::binary | std::ios::app) << "longer";
  }
  EXPECT_THROW(reader.take(), Error);
}

// Before its first step, or after a step has been taken and while it reads ahead. Its thread has ended when the
// destructor returns: it writes no more, however long another reader takes.
TEST(BatchReader, WritesNothingOnceItIsDestroyed) {
  const Dataset data(config(), 1);
  BatchShape shape{.rows = 42, .first_row = 0, .own_rows = 42, .positions = {{0, 1, 1}}, .restart = false};
  const std::vector<int64_t> untouched(static_cast<size_t>(shape.values()), -7);
  std::vector<int64_t> a = untouched, b = untouched, first_step;
  for (int i = 0; i < 20; ++i) {
    {
      BatchReader reader(data, shape, 1, 0, 1'000'000, {a.data(), b.data()});
      if (i % 2 == 1) reader.take();
    }
    a = b = untouched;
    std::vector<int64_t> c = untouched;
    BatchReader other(data, shape, 1, 0, 1, {c.data()});
    other.take();
    if (i == 0) first_step = c;
    EXPECT_EQ(c, first_step);
    EXPECT_NE(c, untouched);
    EXPECT_EQ(a, untouched);
    EXPECT_EQ(b, untouched);
  }
}

}  // namespace
}  // namespace annulus::batch_reader_test
