// Tests of runtime/data/packing.h and runtime/data/permutation.h.
#include "runtime/data/packing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <set>

#include "common/error.h"
#include "runtime/data/permutation.h"

namespace annulus::packing_test {
namespace {

struct Collected : Packer::Sink {
  std::vector<PlacedPiece> pieces;
  std::vector<size_t> windows;
  void add(const PlacedPiece& piece) override { pieces.push_back(piece); }
  void end_window() override { windows.push_back(pieces.size()); }
};

// Packs consecutive units; each has one more token than positions, since its last token is only a target.
struct Packed : Collected {
  Packed(Packing packing, int64_t context, const std::vector<int64_t>& positions) {
    Packer packer(packing, context, *this);
    int64_t token = 0;
    for (const int64_t n : positions) {
      packer.add(token, n);
      token += n + 1;
    }
    packer.finish();
    rows = packer.rows();
    targets = packer.targets();
  }

  // The pieces as "token+count token+count | ...": "|" begins a row and "_n" stands for n unused positions.
  std::string text(int64_t context) const {
    std::string out;
    uint64_t end = 0;
    for (const PlacedPiece& p : pieces) {
      if (p.place != end) out += "_" + std::to_string(p.place - end) + " ";
      if (p.place % static_cast<uint64_t>(context) == 0 && p.place > 0) out += "| ";
      out += std::to_string(p.token) + "+" + std::to_string(p.count) + " ";
      end = p.place + p.count;
    }
    return out;
  }

  int64_t rows = 0, targets = 0;
};

TEST(Packing, StreamIsCutAtRowEnds) {
  const Packed packed(Packing::kStream, 4, {3, 6, 0, 1});
  EXPECT_EQ(packed.text(4), "0+3 4+6 12+1 ");
  EXPECT_EQ(packed.rows, 3);
  EXPECT_EQ(packed.targets, 10);
}

TEST(Packing, DocumentPackingPutsOneDocumentPerRow) {
  const Packed packed(Packing::kDocument, 4, {3, 6, 0, 8, 1});
  EXPECT_EQ(packed.text(4), "0+3 _1 | 4+4 | 8+2 _2 | 12+4 | 16+4 | 21+1 ");
  EXPECT_EQ(packed.rows, 6);
}

TEST(Packing, BestFitUsesTheFullestRowWithRoom) {
  // In order of decreasing length: 7 opens a row, 6 another, 3 joins the 7, 2 joins the 6, and the 1s fill up.
  const Packed packed(Packing::kBestFit, 10, {2, 7, 1, 3, 6, 1});
  EXPECT_EQ(packed.text(10), "3+7 13+3 | 0+2 11+1 17+6 24+1 ");
  EXPECT_EQ(packed.rows, 2);
  // A document longer than a row first fills whole rows.
  EXPECT_EQ(Packed(Packing::kBestFit, 4, {10, 2, 4}).text(4), "0+4 | 4+4 | 14+4 | 8+2 11+2 ");
}

TEST(Packing, BestFitNeedsAsManyRowsAsTheNaiveAlgorithm) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 50; ++round) {
    const auto context = static_cast<int64_t>(random() % 5000 + 1);
    std::vector<int64_t> positions(random() % 2000);
    for (int64_t& n : positions) n = static_cast<int64_t>(random() % static_cast<uint64_t>(context) + 1);
    const Packed packed(Packing::kBestFit, context, positions);
    // The naive algorithm with the same rule.
    std::sort(positions.begin(), positions.end(), std::greater<>());
    std::multiset<int64_t> rooms;
    for (const int64_t n : positions) {
      const auto it = rooms.lower_bound(n);
      const int64_t room = it == rooms.end() ? context : *it;
      if (it != rooms.end()) rooms.erase(it);
      rooms.insert(room - n);
    }
    EXPECT_EQ(packed.rows, static_cast<int64_t>(rooms.size()));
  }
}

TEST(Packing, EachPositionIsInOneRow) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 300; ++round) {
    const auto packing = static_cast<Packing>(round % 3);
    const auto context = static_cast<int64_t>(random() % 100 + 1);
    std::vector<int64_t> positions(random() % 200);
    for (int64_t& n : positions) n = static_cast<int64_t>(random() % (round % 7 == 0 ? 1000 : 60));
    const Packed packed(packing, context, positions);
    const int64_t inputs = std::accumulate(positions.begin(), positions.end(), int64_t{0});
    std::vector<int> seen(static_cast<size_t>(inputs) + positions.size());  // by token, how often it is an input
    uint64_t end = 0;
    for (const PlacedPiece& p : packed.pieces) {
      EXPECT_GE(p.place, end);
      if (packing != Packing::kStream) {
        EXPECT_LE(p.place % static_cast<uint64_t>(context) + p.count, static_cast<uint64_t>(context));
      }
      end = p.place + p.count;
      for (uint64_t i = 0; i < p.count; ++i) ++seen.at(p.token + i);
    }
    EXPECT_EQ(packed.rows, (static_cast<int64_t>(end) + context - 1) / context);
    std::vector<int> expected;
    for (const int64_t n : positions) {
      expected.insert(expected.end(), static_cast<size_t>(n), 1);
      expected.push_back(0);
    }
    EXPECT_EQ(seen, expected);
    EXPECT_EQ(packed.targets, inputs);
  }
}

TEST(Packing, WindowsKeepTheOrderOfTheirTokens) {
  for (const Packing packing : {Packing::kStream, Packing::kBestFit, Packing::kDocument}) {
    std::mt19937_64 random(3);
    std::vector<int64_t> positions(150000);
    for (int64_t& n : positions) n = static_cast<int64_t>(random() % 50 + 1);
    const Packed packed(packing, 40, positions);
    ASSERT_EQ(packed.windows.size(), 3u);
    EXPECT_EQ(packed.windows.back(), packed.pieces.size());
    for (size_t w = 1; w < 3; ++w) {
      const auto by_token = [](const PlacedPiece& a, const PlacedPiece& b) { return a.token < b.token; };
      const auto begin = packed.pieces.begin();
      const auto border = begin + static_cast<std::ptrdiff_t>(packed.windows[w - 1]);
      EXPECT_LT(std::max_element(begin, border, by_token)->token,
                std::min_element(border, packed.pieces.end(), by_token)->token);
    }
  }
}

TEST(Packing, SettingsWithTheSameRowsHaveTheSameText) {
  PackSettings a{128, Packing::kBestFit, false, 0.1, false}, b = a;
  b.documents = true;
  EXPECT_EQ(a.text(), b.text());
  a.packing = b.packing = Packing::kStream;
  EXPECT_NE(a.text(), b.text());
  EXPECT_EQ(a.text(), "context=128 packing=stream documents=0 validation=0.1 refuse_long=0");
}

TEST(KeyedPermutation, IsAPermutation) {
  for (int64_t n = 1; n < 300; ++n) {
    for (const uint64_t key : {0u, 1u, 77u}) {
      const KeyedPermutation order(n, key);
      std::set<int64_t> seen;
      for (int64_t i = 0; i < n; ++i) seen.insert(order.at(i));
      EXPECT_EQ(seen.size(), static_cast<size_t>(n));
      EXPECT_EQ(*seen.begin(), 0);
      EXPECT_EQ(*seen.rbegin(), n - 1);
    }
  }
  const KeyedPermutation large(int64_t{1} << 40, 5);
  std::set<int64_t> seen;
  for (int64_t i = 0; i < 10000; ++i) seen.insert(large.at(i * 104729));
  EXPECT_EQ(seen.size(), 10000u);
  EXPECT_THROW(large.at(int64_t{1} << 40), Error);
  EXPECT_THROW(KeyedPermutation(0, 1), Error);
}

// All first numbers and all differences between the last two numbers are equally likely: their chi-square statistics
// lie within what chance gives.
TEST(KeyedPermutation, PassesAChiSquareTest) {
  for (const int64_t n : {2, 3, 5, 7, 16, 17, 100}) {
    const int64_t keys = 2000 * n;
    std::vector<int64_t> first(static_cast<size_t>(n)), step(static_cast<size_t>(n));
    for (int64_t key = 0; key < keys; ++key) {
      const KeyedPermutation order(n, static_cast<uint64_t>(key));
      ++first[static_cast<size_t>(order.at(0))];
      ++step[static_cast<size_t>((order.at(n - 1) - order.at(n - 2) + n) % n)];
    }
    EXPECT_EQ(step[0], 0);
    const auto statistic = [&](const std::vector<int64_t>& counts, size_t from) {
      const double expected = static_cast<double>(keys) / static_cast<double>(counts.size() - from);
      return std::accumulate(counts.begin() + static_cast<std::ptrdiff_t>(from), counts.end(), 0.0,
                             [&](double sum, int64_t c) {
                               const double off = static_cast<double>(c) - expected;
                               return sum + off * off / expected;
                             });
    };
    const double bound = static_cast<double>(n) + 6 * std::sqrt(2.0 * static_cast<double>(n));
    EXPECT_LT(statistic(first, 0), bound) << n;
    EXPECT_LT(statistic(step, 1), bound) << n;
  }
}

}  // namespace
}  // namespace annulus::packing_test
