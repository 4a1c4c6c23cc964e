// Tests of the oracle itself against what is known from elsewhere: published answers of its generators, the examples of
// docs/explanation/attention.md, and small cases that can be worked out by hand. All other tests of attention rely on
// it.
#include "attention/oracle/oracle.h"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "attention/oracle/draws.h"

namespace annulus::oracle_test {
namespace {

using Words = std::array<uint32_t, 4>;

// The known answers that the authors of Philox publish with Random123 (tests/kat_vectors, philox4x32 10).
TEST(Oracle, PhiloxGivesThePublishedAnswers) {
  using oracle_draws::philox4x32_10;
  EXPECT_EQ(philox4x32_10({0, 0, 0, 0}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(philox4x32_10({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32_10({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

// The first numbers of splitmix64 (prng.di.unimi.it/splitmix64.c) from the seed 1234567. The n-th one is mix of the
// state before it is advanced.
TEST(Oracle, MixIsTheOutputOfSplitmix64) {
  uint64_t state = 1234567;
  for (const uint64_t want : {uint64_t{6457827717110365317u}, uint64_t{3203168211198807973u},
                              uint64_t{9817491932198370423u}, uint64_t{4593380528125082431u}}) {
    EXPECT_EQ(oracle_draws::mix(state), want);
    state += 0x9e3779b97f4a7c15;
  }
}

// Which pairs of blocks are active, a line for each query block: '#' where a pair of their first positions counts.
std::vector<std::string> picture(const Count& count, int64_t rows, int64_t columns, int64_t block, int64_t head = 0) {
  std::vector<std::string> lines;
  for (int64_t i = 0; i < rows; ++i) {
    std::string line;
    for (int64_t j = 0; j < columns; ++j) line += count(0, head, i * block, j * block) ? '#' : '.';
    lines.push_back(line);
  }
  return lines;
}

std::vector<std::string> picture_of(const std::string& map, int64_t blocks) {
  const PatternSpec spec = parse_pattern("{ kind = \"blocks\", block = 16, " + map + " }", "test");
  return picture(count_of(spec, {1, 1, 1, 16 * blocks, 16 * blocks, 0}), blocks, blocks, 16);
}

TEST(Oracle, NamedMapsAreThoseOfTheDocumentation) {
  using Lines = std::vector<std::string>;
  EXPECT_EQ(picture_of("map = \"local\", window_blocks = 1", 4), (Lines{"##..", "###.", ".###", "..##"}));
  EXPECT_EQ(picture_of("map = \"local\", window_blocks = 1, causal = true", 3), (Lines{"#..", "##.", ".##"}));
  EXPECT_EQ(picture_of("map = \"dilated\", window_blocks = 2, rate = 2", 4), (Lines{"#.#.", ".#.#", "#.#.", ".#.#"}));
  EXPECT_EQ(picture_of("map = \"global-local\", window_blocks = 0, global_blocks = 1", 4),
            (Lines{"####", "##..", "#.#.", "#..#"}));
  EXPECT_EQ(picture_of("map = \"global-local\", window_blocks = 0, global_blocks = 1, causal = true", 4),
            (Lines{"#...", "##..", "#.#.", "#..#"}));
  EXPECT_EQ(picture_of("map = \"strided\", window_blocks = 0, stride = 2", 4), (Lines{"##.#", ".#.#", ".###", ".#.#"}));
  EXPECT_EQ(picture_of("map = \"hierarchical\", levels = [[1, 0], [2, 3]]", 5),
            (Lines{"##.#.", ".#.#.", ".###.", ".#.#.", ".#.##"}));
}

// What does not depend on the generator: each query block draws as many as it should, from those that it may draw.
TEST(Oracle, BigBirdDrawsFromTheEligibleBlocks) {
  for (const bool causal : {false, true}) {
    const PatternSpec spec = parse_pattern(
        "{ kind = \"blocks\", map = \"bigbird\", block = 16, window_blocks = 1, global_blocks = 2, random_blocks = 3, "
        "seed = 9, causal = " +
            std::string(causal ? "true" : "false") + " }",
        "test");
    const Count count = count_of(spec, {1, 2, 1, 16 * 12, 16 * 12, 0});
    const std::vector<std::string> first = picture(count, 12, 12, 16, 0), second = picture(count, 12, 12, 16, 1);
    EXPECT_NE(first, second);
    for (int64_t i = 0; i < 12; ++i) {
      int64_t eligible = 0, drawn = 0;
      for (int64_t j = 0; j < 12; ++j) {
        const bool future = causal && j > i, near = std::abs(i - j) <= 1, global = j < 2 || (!causal && i < 2);
        const bool active = first[static_cast<size_t>(i)][static_cast<size_t>(j)] == '#';
        if (future || near || global) {
          EXPECT_EQ(active, !future) << i << ", " << j;
        } else {
          ++eligible, drawn += active;
        }
      }
      EXPECT_EQ(drawn, std::min<int64_t>(3, eligible)) << i;
    }
  }
}

// The example of docs/explanation/attention.md, "Dilated attention".
TEST(Oracle, DilatedBranchesAreThoseOfTheDocumentation) {
  const PatternSpec spec = parse_pattern("{ kind = \"dilated\", segment_lengths = [8], dilation_rates = [2] }", "test");
  const Count count = count_of(spec, {1, 2, 1, 16, 16, 0});
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t q = 0; q < 16; ++q) {
      for (int64_t k = 0; k < 16; ++k) {
        EXPECT_EQ(count(0, h, q, k), (q < 8) == (k < 8) && q % 2 == h && k % 2 == h) << h << ", " << q << ", " << k;
      }
    }
  }
}

// q and k of one number a position, constant within each block.
at::Tensor of_blocks(const std::vector<double>& values) {
  at::Tensor t = at::zeros({1, 16 * static_cast<int64_t>(values.size()), 1, 1}, at::kDouble);
  for (size_t i = 0; i < values.size(); ++i) t.narrow(1, 16 * static_cast<int64_t>(i), 16).fill_(values[i]);
  return t;
}

PatternSpec adaptive(const std::string& more) {
  return parse_pattern("{ kind = \"blocks\", map = \"adaptive\", block = 16, " + more + " }", "test");
}

TEST(Oracle, AdaptiveMapsKeepTheOwnBlockAndTheLargestScores) {
  using Lines = std::vector<std::string>;
  const AttentionShape shape{1, 1, 1, 64, 64, 0};
  at::Tensor q = of_blocks({1, 1, -1, 1});
  const at::Tensor k = of_blocks({3, 5, 5, 4});
  const auto selected = [&](const std::string& more) {
    return picture(count_of(adaptive(more), shape, q, k), 4, 4, 16);
  };
  EXPECT_EQ(selected("keep = 1"), (Lines{"#...", ".#..", "..#.", "...#"}));
  // Blocks 1 and 2 have equal scores. The third query block prefers small keys.
  EXPECT_EQ(selected("keep = 2"), (Lines{"##..", ".##.", "#.#.", ".#.#"}));
  EXPECT_EQ(selected("keep = 3"), (Lines{"###.", ".###", "#.##", ".###"}));
  EXPECT_EQ(selected("keep = 3, causal = true"), (Lines{"#...", "##..", "###.", ".###"}));
  EXPECT_EQ(selected("keep = 9"), (Lines{"####", "####", "####", "####"}));
  q.narrow(1, 0, 1).fill_(-1);  // the first query of the first block alone prefers small keys
  EXPECT_EQ(selected("keep = 2, query = \"first\""), (Lines{"#..#", ".##.", "#.#.", ".#.#"}));
  EXPECT_EQ(selected("keep = 2"), (Lines{"##..", ".##.", "#.#.", ".#.#"}));
  // With a causal union around it nothing after the own block is selected.
  PatternSpec both;
  both.kind = PatternSpec::Kind::kUnion;
  both.causal = true;
  both.members = {adaptive("keep = 2")};
  EXPECT_EQ(picture(count_of(both, shape, q, k), 4, 4, 16), (Lines{"#...", "##..", "#.#.", ".#.#"}));
}

TEST(Oracle, SelectionFaultsAreFound) {
  const AttentionShape shape{1, 1, 1, 64, 64, 0};
  const at::Tensor q = of_blocks({1, 1, 1, 1}), k = of_blocks({1, 2, 0.1, 0.1 * (1 + 0x1p-50)});
  const auto fault = [&](const std::string& more, const std::vector<std::string>& lines) {
    std::vector<uint8_t> active;
    for (const std::string& line : lines) {
      for (const char c : line) active.push_back(c == '#');
    }
    PatternSpec selected = adaptive(more);
    selected.blocks = given_map(std::make_shared<const BlockMap>(block_map_from_dense(active.data(), 16, 1, 1, 4, 4)));
    return selection_fault(adaptive(more), selected, shape, q, k);
  };
  const auto expect = [&](const std::string& found, const std::string& part) {
    EXPECT_NE(found.find(part), std::string::npos) << found;
  };
  EXPECT_EQ(fault("keep = 2", {"##..", "##..", ".##.", ".#.#"}), "");
  expect(fault("keep = 2", {"##..", "##..", "##..", ".#.#"}), "query block 2: the own block 2 is not selected");
  expect(fault("keep = 2", {"##..", "###.", ".##.", ".#.#"}), "query block 1: 3 blocks are selected instead of 2");
  expect(fault("keep = 2", {"#.#.", "##..", ".##.", ".#.#"}), "query block 0: block 2 is selected with the score 0.1");
  expect(fault("keep = 2, causal = true", {"#...", "##..", "..##", ".#.#"}), "query block 2: a block is selected");
  // The last two differ by less than sums of 16 terms in another order might.
  EXPECT_EQ(fault("keep = 3", {"###.", "##.#", "###.", "##.#"}), "");
  PatternSpec none = adaptive("keep = 2");
  EXPECT_NE(selection_fault(none, none, shape, q, k), "");
}

TEST(Oracle, MapsThatAreNotKnownAreErrors) {
  const AttentionShape shape{1, 1, 1, 64, 64, 0};
  EXPECT_THROW(count_of(adaptive("keep = 1"), shape), std::logic_error);
  const PatternSpec file = parse_pattern("{ kind = \"blocks\", map = \"file\", file = \"a.safetensors\" }", "test");
  EXPECT_THROW(count_of(file, shape), std::logic_error);
}

// Two keys with probabilities 1/4 and 3/4: the factors are in out and the gradients, not in lse.
TEST(Oracle, AttentionOfTwoKeys) {
  const at::Tensor q = at::tensor({1.0}).view({1, 1, 1, 1}), dout = at::tensor({1.0}).view({1, 1, 1, 1});
  const at::Tensor k = at::tensor({0.0, std::log(3.0)}).view({1, 2, 1, 1}),
                   v = at::tensor({8.0, 4.0}).view({1, 2, 1, 1});
  const Count all = [](int64_t, int64_t, int64_t, int64_t) { return int64_t{1}; };
  const auto near = [](const at::Tensor& got, const std::vector<double>& want) {
    for (size_t i = 0; i < want.size(); ++i) {
      EXPECT_NEAR(got.reshape({-1})[static_cast<int64_t>(i)].item<double>(), want[i], 1e-14);
    }
  };
  const OracleResult r = oracle(q, k, v, dout, 1, all);
  near(r.out, {5}), near(r.lse, {std::log(4.0)}), near(r.dv, {0.25, 0.75});
  near(r.dk, {0.25 * (8 - 5), 0.75 * (4 - 5)}), near(r.dq, {0.75 * (4 - 5) * std::log(3.0)});
  const OracleResult d = oracle(q, k, v, dout, 1, all, [](int64_t, int64_t, int64_t, int64_t j) { return 2.0 * j; });
  near(d.out, {6}), near(d.lse, {std::log(4.0)}), near(d.dv, {0, 1.5});
  near(d.dk, {0.25 * (0 - 6), 0.75 * (8 - 6)});
  // A key that counts three times.
  near(oracle(q, k.narrow(1, 0, 2).mul(0), v, dout, 1, [](int64_t, int64_t, int64_t, int64_t j) { return 1 + 2 * j; })
           .out,
       {5});
}

// The rate decides alone how many pairs stay, and the draw depends on each part of the key.
TEST(Oracle, DropoutFactors) {
  EXPECT_FALSE(weight_of({}));
  const OracleDropout base{0.25, 3, 1, 2, 0};
  int64_t kept = 0;
  for (int64_t q = 0; q < 100; ++q) {
    for (int64_t k = 0; k < 1000; ++k) {
      const double factor = weight_of(base)(0, 0, q, k);
      ASSERT_TRUE(factor == 0 || factor == 1 / 0.75);
      kept += factor != 0;
    }
  }
  EXPECT_NEAR(static_cast<double>(kept) / 1e5, 0.75, 6 * std::sqrt(0.25 * 0.75 / 1e5));  // six standard deviations
  const auto row = [](const OracleDropout& d, int64_t batch, int64_t head) {
    std::vector<double> factors;
    for (int64_t k = 0; k < 200; ++k) factors.push_back(weight_of(d)(batch, head, 5, k));
    return factors;
  };
  const std::vector<double> factors = row(base, 1, 0);
  EXPECT_EQ(row({0.25, 3, 1, 2, 1}, 0, 0), factors);  // the same global row
  for (const OracleDropout& other : {OracleDropout{0.25, 4, 1, 2, 0}, OracleDropout{0.25, 3, 2, 1, 0},
                                     OracleDropout{0.25, 3, 1, 3, 0}, OracleDropout{0.25, 3, 1, 2, 1}}) {
    EXPECT_NE(row(other, 1, 0), factors);
  }
  EXPECT_NE(row(base, 1, 1), factors);
}

}  // namespace
}  // namespace annulus::oracle_test
