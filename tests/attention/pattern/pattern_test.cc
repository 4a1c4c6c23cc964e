// Tests of patterns: slices against the definitions, texts, and block maps. refusals_test.cc tests what is refused.
#include "attention/pattern/pattern.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <fstream>
#include <set>

#include "attention/oracle/oracle.h"
#include "attention/testing/any_pattern.h"
#include "common/error.h"

namespace annulus::pattern_test {
namespace {

AttentionShape any_shape() {
  const int64_t q = *rc::gen::inRange<int64_t>(0, 100);
  const int64_t k = *rc::gen::inRange(0, 3) ? q : *rc::gen::inRange<int64_t>(0, 100);
  const int64_t kv_heads = *rc::gen::inRange<int64_t>(1, 3);
  const int64_t offset = *rc::gen::element<int64_t>(0, 0, 0, -32, -16, 16, 48, -7, 13);
  return {*rc::gen::inRange<int64_t>(1, 4), kv_heads * *rc::gen::inRange<int64_t>(1, 4), kv_heads, q, k, offset};
}

std::string to_string(const AttentionShape& s) {
  return "batch " + std::to_string(s.batch) + ", heads " + std::to_string(s.heads) + ", " + std::to_string(s.q_len) +
         " queries, " + std::to_string(s.k_len) + " keys, offset " + std::to_string(s.query_offset);
}

// Describes the first pair that the slices do not count as often as the definition does; empty if all agree. Also
// compares the total count.
std::string difference(const PatternSpec& spec, const AttentionShape& shape) {
  const Pattern pattern = make_pattern(spec, shape);
  const Count want = count_of(spec, shape);
  int64_t total = 0;
  std::vector<int64_t> counts(static_cast<size_t>(shape.q_len * shape.k_len));
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      std::fill(counts.begin(), counts.end(), 0);
      for (const Slice& s : pattern.slices) {
        if (!s.batch.contains(b) || !s.heads.contains(h)) continue;
        for (int64_t i = 0; i < s.queries.count; ++i) {
          for (int64_t j = 0; j < s.keys.count; ++j) {
            const int64_t query = s.queries.at(i), key = s.keys.at(j);
            const bool hidden =
                s.mask >= 0 && !pattern.masks.at(static_cast<size_t>(s.mask)).bits(query, key).shows(key);
            if (!hidden && s.band.contains(query, key)) {
              ++counts.at(static_cast<size_t>(query * shape.k_len + key));
            }
          }
        }
      }
      for (int64_t q = 0; q < shape.q_len; ++q) {
        for (int64_t k = 0; k < shape.k_len; ++k) {
          const int64_t got = counts[static_cast<size_t>(q * shape.k_len + k)];
          total += got;
          if (got == want(b, h, q, k)) continue;
          return "batch row " + std::to_string(b) + ", head " + std::to_string(h) + ", query " + std::to_string(q) +
                 ", key " + std::to_string(k) + ": " + std::to_string(got) + " instead of " +
                 std::to_string(want(b, h, q, k));
        }
      }
    }
  }
  if (total != count_pairs(pattern)) {
    return "count_pairs: " + std::to_string(count_pairs(pattern)) + " instead of " + std::to_string(total);
  }
  return "";
}

RC_GTEST_PROP(Pattern, SlicesCountEveryPairAsDefined, ()) {
  // Several draws make each kind of pattern and of block map occur often.
  for (int i = 0; i < 20; ++i) {
    const AttentionShape shape = any_shape();
    const PatternSpec spec = testing::any_pattern(shape);
    if (const std::string found = difference(spec, shape); !found.empty()) {
      RC_FAIL(to_string(shape) + "\n" + spec.text() + "\n" + found);
    }
  }
}

RC_GTEST_PROP(Pattern, GivenBlockMapsCountThePairsOfTheirActiveBlocks, ()) {
  const AttentionShape shape = any_shape();
  PatternSpec spec;
  spec.kind = PatternSpec::Kind::kBlocks;
  spec.causal = *rc::gen::arbitrary<bool>();
  spec.blocks = given_map(std::make_shared<const BlockMap>(testing::any_block_map(shape, 16)));
  RC_LOG() << to_string(shape) << "\n" << spec.text() << "\n";
  RC_ASSERT(difference(spec, shape) == "");
}

// What a file says about each pair of blocks, not what the map that is made of it says.
RC_GTEST_PROP(Pattern, MapsOfDenseDataCountThePairsOfTheirNonzeroBlocks, ()) {
  const AttentionShape shape = any_shape();
  constexpr int64_t kBlock = 16;
  const int64_t batch = *rc::gen::element(int64_t{1}, shape.batch), heads = *rc::gen::element(int64_t{1}, shape.heads);
  const int64_t rows = ceil_div(shape.q_len, kBlock), columns = ceil_div(shape.k_len, kBlock);
  const auto data = *rc::gen::container<std::vector<uint8_t>>(static_cast<size_t>(batch * heads * rows * columns),
                                                              rc::gen::element<uint8_t>(0, 0, 1, 255));
  PatternSpec spec;
  spec.kind = PatternSpec::Kind::kBlocks;
  spec.blocks = given_map(
      std::make_shared<const BlockMap>(block_map_from_dense(data.data(), kBlock, batch, heads, rows, columns)));
  RC_LOG() << to_string(shape) << "\n" << spec.text() << "\n";
  RC_ASSERT(difference(spec, shape) == "");
  const Count count = count_of(spec, shape);
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      for (int64_t q = 0; q < shape.q_len; ++q) {
        for (int64_t k = 0; k < shape.k_len; ++k) {
          const int64_t plane = (batch == 1 ? 0 : b) * heads + (heads == 1 ? 0 : h);
          const int64_t place = (plane * rows + q / kBlock) * columns + k / kBlock;
          RC_ASSERT(count(b, h, q, k) == (data[static_cast<size_t>(place)] != 0));
        }
      }
    }
  }
}

RC_GTEST_PROP(Pattern, MasksRestrictEveryKindAndMemberToTheirPairs, ()) {
  const AttentionShape shape = any_shape();
  const PatternSpec spec = *rc::gen::arbitrary<bool>() ? testing::with_any_mask(testing::any_pattern(shape), shape)
                                                       : testing::any_masked_union(shape);
  RC_LOG() << to_string(shape) << "\n" << spec.text() << "\n";
  RC_ASSERT(difference(spec, shape) == "");
}

RC_GTEST_PROP(Pattern, TextRoundTrips, ()) {
  const PatternSpec spec = testing::any_pattern(any_shape());
  RC_LOG() << spec.text() << "\n";
  const PatternSpec read = parse_pattern(spec.text(), "--pattern");
  RC_ASSERT(read.text() == spec.text());
}

TEST(Pattern, TextOfEveryKeyRoundTrips) {
  for (const char* text : {
           "{ kind = \"full\" }",
           "{ kind = \"causal\" }",
           "{ kind = \"causal\", documents = [700, 1348] }",
           "{ kind = \"causal\", kept_keys = [[0, 700], [750, 900]] }",
           "{ kind = \"full\", kept_keys = [[], [[3, 4]], [[0, 2048]]] }",
           "{ kind = \"full\", mask = \"m.safetensors\", mask_digest = \"0123\" }",
           "{ kind = \"causal\", mask = \"m.safetensors\" }",
           "{ kind = \"documents\", documents = [[700, 1348], [2048, 0]] }",
           "{ kind = \"documents\", documents = [3, 4], key_documents = [5, 6] }",
           "{ kind = \"window\", left = 1023, right = 0 }",
           "{ kind = \"window\", left = 3, right = 4, causal = true, documents = [9] }",
           "{ kind = \"window\", left = -1, right = 4 }",
           "{ kind = \"window\", left = 1023, right = 0, sink_tokens = 4 }",
           "{ kind = \"dilated\", segment_lengths = [2048, 4096], dilation_rates = [1, 2], offsets = \"groups\", "
           "combine = \"mean\", equal_segments = true }",
           "{ kind = \"blocks\", map = \"local\", block = 64, window_blocks = 2 }",
           "{ kind = \"blocks\", map = \"dilated\", block = 128, window_blocks = 8, rate = 2 }",
           "{ kind = \"blocks\", map = \"global-local\", block = 128, global_blocks = 1, window_blocks = 2 }",
           "{ kind = \"blocks\", map = \"bigbird\", block = 128, window_blocks = 1, global_blocks = 1, "
           "random_blocks = 3, seed = -7, per_head = false }",
           "{ kind = \"blocks\", map = \"strided\", block = 128, window_blocks = 1, stride = 4 }",
           "{ kind = \"blocks\", map = \"hierarchical\", block = 128, levels = [[1, 2], [4, 16]] }",
           "{ kind = \"blocks\", map = \"adaptive\", block = 128, keep = 8, query = \"first\", causal = true }",
           "{ kind = \"blocks\", map = \"file\", block = 128, file = \"a \\\"b\\\" \\\\ c\\u0009.safetensors\", "
           "digest = \"00ff\" }",
           "{ kind = \"tree\", lengths = [2, 3, 0, 4], parents = [-1, 0, 0, -1] }",
           "{ kind = \"tree\", lengths = [[2, 3], [5]], parents = [[-1, 0], [-1]], documents = [4, 1] }",
           "{ kind = \"union\", of = [{ kind = \"causal\" }, { kind = \"window\", left = 1, right = 2 }], causal = "
           "true }",
           "{ kind = \"slices\", slices = [{ queries = [0, 1, 8], keys = [1, 2, 3] }, { queries = [0, 1, 8], keys = "
           "[1, 2, 3], heads = [0, 2, 2], batch = [1, 1, 1], lo = -3, hi = 4 }] }",
           "{ kind = \"slices\", slices = [] }",
       }) {
    EXPECT_EQ(parse_pattern(text, "--pattern").text(), text);
  }
}

TEST(Pattern, ParsesTheExamplesOfTheDocumentation) {
  std::ifstream file("docs/explanation/attention.md");
  int examples = 0;
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("    { kind", 0) != 0) continue;
    EXPECT_NO_THROW(parse_pattern(line, "docs/explanation/attention.md")) << line;
    ++examples;
  }
  EXPECT_GE(examples, 19);  // every kind and every map
}

TEST(Pattern, EquivalentSpellingsHaveOneText) {
  EXPECT_EQ(parse_pattern("{ kind = \"full\", causal = true }", "").text(), "{ kind = \"causal\" }");
  EXPECT_EQ(parse_pattern("{ documents = [[3, 4]], causal = true, kind = \"documents\" }", "").text(),
            "{ kind = \"causal\", documents = [3, 4] }");
  EXPECT_EQ(parse_pattern("{ kind = \"blocks\", window_blocks = 1, map = \"local\" }", "").text(),
            "{ kind = \"blocks\", map = \"local\", block = 128, window_blocks = 1 }");
  const auto window = [](const std::string& keys) {
    return parse_pattern("{ kind = \"window\", " + keys + " }", "").text();
  };
  EXPECT_EQ(window("left = -1, right = 0"), causal_pattern().text());
  EXPECT_EQ(window("left = -1, right = 0, documents = [3, 4]"), "{ kind = \"causal\", documents = [3, 4] }");
  EXPECT_EQ(window("left = -1, right = 3, causal = true"), causal_pattern().text());
  EXPECT_EQ(window("left = -1, right = -1"), PatternSpec().text());
  EXPECT_EQ(window("left = -1, right = 0, sink_tokens = 4"), causal_pattern().text());
  EXPECT_EQ(window("left = 5, right = 0, sink_tokens = 0"), "{ kind = \"window\", left = 5, right = 0 }");
  EXPECT_EQ(window("left = 5, right = 0, causal = true"), "{ kind = \"window\", left = 5, right = 0 }");
  // Patterns are also equal if their texts are, as exports and caches compare them.
  const auto spec = [](const std::string& text) { return parse_pattern(text, ""); };
  EXPECT_EQ(spec("{ kind = \"window\", left = 5, right = 0, causal = true }"),
            spec("{ kind = \"window\", left = 5, right = 0 }"));
  EXPECT_EQ(spec("{ kind = \"window\", left = -1, right = 0, sink_tokens = 2 }"), causal_pattern());
  EXPECT_EQ(spec("{ kind = \"tree\", lengths = [[5]], parents = [[-1]], causal = true }"),
            spec("{ kind = \"tree\", lengths = [5], parents = [-1] }"));
  EXPECT_EQ(spec("{ kind = \"union\", of = [{ kind = \"window\", left = -1, right = -1 }] }"),
            spec("{ kind = \"union\", of = [{ kind = \"full\" }] }"));
}

size_t slices_of(const std::string& text, const AttentionShape& shape) {
  return make_pattern(parse_pattern(text, ""), shape).slices.size();
}

TEST(Pattern, TakesFewSlices) {
  const AttentionShape shape{2, 12, 4, 65536, 65536, 0};
  const std::string blocks = "{ kind = \"blocks\", map = ";  // 512 x 512 of them
  EXPECT_EQ(slices_of("{ kind = \"causal\" }", shape), 1u);
  EXPECT_EQ(slices_of("{ kind = \"documents\", documents = [30000, 1, 35535, 0] }", shape), 3u);
  // Each batch row has its own documents, and the window crosses none of their borders.
  EXPECT_EQ(slices_of("{ kind = \"window\", left = 9, right = 0, documents = [[65536], [65500, 36]] }", shape), 3u);
  // LongNet's base setting has a slice for each segment and each offset of a head.
  EXPECT_EQ(slices_of("{ kind = \"window\", left = 9, right = 0, sink_tokens = 4, documents = [65500, 36] }", shape),
            6u);
  EXPECT_EQ(slices_of("{ kind = \"dilated\", segment_lengths = [2048, 4096, 8192, 16384, 32768], dilation_rates = "
                      "[1, 2, 4, 6, 12] }",
                      shape),
            size_t{32 + 16 * 2 + 8 * 4 + 4 * 6 + 2 * 12});
  // One for each node; rows with equal trees share them, and a node without tokens has none.
  EXPECT_EQ(slices_of("{ kind = \"tree\", lengths = [65000, 500, 0, 36], parents = [-1, 0, 0, 2] }", shape), 3u);
  EXPECT_EQ(slices_of("{ kind = \"tree\", lengths = [[65535, 1], [65535, 1]], parents = [[-1, 0], [-1, 0]] }", shape),
            2u);
  EXPECT_EQ(slices_of("{ kind = \"tree\", lengths = [[65535, 1], [65535, 1]], parents = [[-1, 0], [-1, -1]] }", shape),
            4u);
  EXPECT_EQ(slices_of("{ kind = \"dilated\", segment_lengths = [1000000], dilation_rates = [1] }", shape), 1u);
  EXPECT_EQ(slices_of("{ kind = \"dilated\", segment_lengths = [65536], dilation_rates = [1000] }", shape), 12u);
  EXPECT_EQ(slices_of(blocks + "\"local\", window_blocks = 3 }", shape), 512u);
  // A row of global blocks, a column of them in at most two parts, and the windows.
  EXPECT_LE(slices_of(blocks + "\"global-local\", window_blocks = 3, global_blocks = 2, causal = true }", shape), 515u);
  EXPECT_LE(slices_of(blocks + "\"global-local\", window_blocks = 3, global_blocks = 2 }", shape), 515u);
  // Every 16th column of blocks is a tall slice, cut where the window meets it.
  EXPECT_LE(slices_of(blocks + "\"strided\", window_blocks = 1, stride = 16 }", shape), size_t{512 + 3 * 32});
  EXPECT_LE(slices_of(blocks + "\"bigbird\", window_blocks = 1, global_blocks = 1, random_blocks = 2, per_head = "
                               "false }",
                      shape),
            size_t{512 * 4});
}

TEST(Pattern, SinkTokensAreCountedOnceBesideTheWindow) {
  const auto picture = [](const std::string& keys, const AttentionShape& shape) {
    const PatternSpec spec = parse_pattern("{ kind = \"window\", " + keys + " }", "");
    EXPECT_EQ(difference(spec, shape), "") << keys;
    const Count count = count_of(spec, shape);
    std::vector<std::string> rows;
    for (int64_t q = 0; q < shape.q_len; ++q) {
      rows.emplace_back();
      for (int64_t k = 0; k < shape.k_len; ++k) rows.back() += ".123"[count(0, 0, q, k)];
    }
    return rows;
  };
  using Rows = std::vector<std::string>;
  const AttentionShape five{1, 1, 1, 5, 5, 0};
  EXPECT_EQ(picture("left = 1, right = 0, sink_tokens = 2", five), (Rows{"1....", "11...", "111..", "1111.", "11.11"}));
  // Queries before the window's right side see the sink tokens as well, unless the window is causal.
  EXPECT_EQ(picture("left = 0, right = 1, sink_tokens = 3", {1, 1, 1, 5, 5, -1}),
            (Rows{"111..", "111..", "111..", "1111.", "11111"}));
  EXPECT_EQ(picture("left = 0, right = 1, sink_tokens = 3, causal = true", {1, 1, 1, 5, 5, -1}),
            (Rows{".....", "1....", "11...", "111..", "1111."}));
  // Of each document, and of the keys' in cross-attention.
  EXPECT_EQ(picture("left = 0, right = 0, sink_tokens = 1, documents = [2, 3]", five),
            (Rows{"1....", "11...", "..1..", "..11.", "..1.1"}));
  EXPECT_EQ(
      picture("left = 0, right = 0, sink_tokens = 1, documents = [1, 1], key_documents = [2, 4]", {1, 1, 1, 2, 6, 4}),
      (Rows{"1.....", "..1..1"}));
  EXPECT_EQ(picture("left = -1, right = 1, sink_tokens = 4", five),
            (Rows{"1111.", "1111.", "1111.", "11111", "11111"}));
}

// Documents of a union are those of a member that has none of its own.
TEST(Pattern, SinkTokensAreThoseOfTheNearestDocuments) {
  const AttentionShape shape{2, 1, 1, 9, 9, 0};
  const std::string window = "{ kind = \"window\", left = 0, right = 0, sink_tokens = 2";
  const auto parse = [](const std::string& text) { return parse_pattern(text, ""); };
  const PatternSpec within =
      parse("{ kind = \"union\", of = [{ kind = \"union\", of = [" + window + " }] }], documents = [[4, 5], [9]] }");
  const PatternSpec itself = parse(window + ", documents = [[4, 5], [9]] }");
  const PatternSpec both =
      parse("{ kind = \"union\", of = [" + window + ", documents = [[4, 5], [9]] }], documents = [6, 3] }");
  for (const PatternSpec& spec : {within, itself, both}) EXPECT_EQ(difference(spec, shape), "") << spec.text();
  const auto pairs = [&](const PatternSpec& spec) { return count_pairs(make_pattern(spec, shape)); };
  EXPECT_EQ(pairs(within), pairs(itself));
  EXPECT_EQ(pairs(itself), (1 + 2 + 3 + 3) + (1 + 2 + 3 + 3 + 3) + (1 + 2 + 7 * 3));
  EXPECT_EQ(pairs(both), (1 + 2 + 3 + 3) + (1 + 2) + (1 + 1 + 1) + (1 + 2 + 4 * 3) + (1 + 1 + 1));
}

TEST(Pattern, BatchRowsKeepTheirOwnTrees) {
  const PatternSpec spec = parse_pattern(
      "{ kind = \"union\", of = [{ kind = \"tree\", lengths = [[5], [2, 3], [1, 4]], parents = [[-1], [-1, 0], [-1, "
      "-1]] }, "
      "{ kind = \"tree\", lengths = [4, 1], parents = [-1, 0] }] }",
      "");
  EXPECT_EQ(of_batch_rows(spec, 1, 2).text(),
            "{ kind = \"union\", of = [{ kind = \"tree\", lengths = [[2, 3], [1, 4]], parents = [[-1, 0], [-1, -1]] }, "
            "{ kind = \"tree\", lengths = [4, 1], parents = [-1, 0] }] }");
  EXPECT_NE(of_batch_rows(spec, 1, 1).hash(), of_batch_rows(spec, 2, 1).hash());
  EXPECT_GT(spec.bytes(), of_batch_rows(spec, 1, 1).bytes());
}

TEST(Pattern, WindowsMayBeOpenOnEitherSide) {
  const AttentionShape shape{1, 1, 1, 9, 12, 3};
  const auto pairs = [&](const std::string& text) { return count_pairs(make_pattern(parse_pattern(text, ""), shape)); };
  const std::string window = "{ kind = \"window\", ";
  EXPECT_EQ(pairs(window + "left = -1, right = -1 }"), 9 * 12);
  EXPECT_EQ(pairs(window + "left = -1, right = 0 }"), pairs("{ kind = \"causal\" }"));
  EXPECT_EQ(pairs(window + "left = -1, right = -1, causal = true }"), pairs("{ kind = \"causal\" }"));
  EXPECT_EQ(pairs(window + "left = -1, right = 2 }"), pairs(window + "left = 11, right = 2 }"));
  EXPECT_EQ(pairs(window + "left = 1, right = -1 }"), pairs(window + "left = 1, right = 11 }"));
  EXPECT_EQ(pairs(window + "left = 0, right = -1, documents = [4, 5], key_documents = [7, 5] }"),
            (4 + 3 + 2 + 1) + (5 + 4 + 3 + 2 + 1));
}

// Both ways in which libraries write slices: each kind of MagiAttention's, for 4 queries and 6 keys.
TEST(Pattern, SlicesHaveEveryKindOfBand) {
  const auto picture = [](const std::string& band) {
    const Pattern pattern = make_pattern(
        parse_pattern("{ kind = \"slices\", slices = [{ queries = [0, 1, 4], keys = [0, 1, 6]" + band + " }] }", ""),
        {1, 1, 1, 4, 6, 0});
    const Slice& slice = pattern.slices.at(0);
    std::vector<std::string> rows;
    for (int64_t q = 0; q < 4; ++q) {
      rows.emplace_back();
      for (int64_t k = 0; k < 6; ++k) rows.back() += slice.band.contains(q, k) ? '#' : '.';
    }
    EXPECT_EQ(
        difference(parse_pattern(
                       "{ kind = \"slices\", slices = [{ queries = [0, 1, 4], keys = [0, 1, 6]" + band + " }] }", ""),
                   {1, 1, 1, 4, 6, 0}),
        "");
    return rows;
  };
  using Rows = std::vector<std::string>;
  EXPECT_EQ(picture(""), (Rows{"######", "######", "######", "######"}));          // full
  EXPECT_EQ(picture(", hi = 2"), (Rows{"###...", "####..", "#####.", "######"}));  // causal: the last query sees all
  EXPECT_EQ(picture(", lo = 0"), (Rows{"######", ".#####", "..####", "...###"}));  // inverse causal
  EXPECT_EQ(picture(", lo = 0, hi = 2"), (Rows{"###...", ".###..", "..###.", "...###"}));  // bi-causal
}

TEST(Pattern, CountsPairsOfHugeShapes) {
  const int64_t n = int64_t{1} << 30;
  EXPECT_EQ(count_pairs(make_pattern(causal_pattern(), {1, 1, 1, n, n, 0})), n * (n + 1) / 2);
  EXPECT_EQ(
      count_pairs(make_pattern(parse_pattern("{ kind = \"window\", left = 1023, right = 0 }", ""), {2, 3, 1, n, n, 0})),
      6 * (1024 * n - 1023 * 1024 / 2));
}

TEST(Pattern, MeanCombineDividesByTheNumberOfBranches) {
  const std::string text = "{ kind = \"dilated\", segment_lengths = [8, 16, 32], dilation_rates = [1, 2, 4]";
  EXPECT_EQ(output_divisor(parse_pattern(text + ", combine = \"mean\" }", "")), 3);
  EXPECT_EQ(output_divisor(parse_pattern(text + " }", "")), 1);
  // Eight heads in groups of 3, 3 and 2.
  const Pattern pattern = make_pattern(parse_pattern(text + ", combine = \"mean\" }", ""), {1, 8, 8, 32, 32, 0});
  std::set<int64_t> with_long_segments;
  for (const Slice& s : pattern.slices) {
    if (s.keys.last() - s.keys.begin >= 16) {
      for (int64_t h = 0; h < s.heads.count; ++h) with_long_segments.insert(s.heads.at(h));
    }
  }
  EXPECT_EQ(with_long_segments, (std::set<int64_t>{6, 7}));
}

RC_GTEST_PROP(Pattern, SeesLaterEqualsTheDefinition, ()) {
  for (int i = 0; i < 20; ++i) {
    const AttentionShape shape = any_shape();
    const PatternSpec spec = testing::any_pattern(shape);
    const Count count = count_of(spec, shape);
    bool later = false;
    for (int64_t b = 0; b < shape.batch; ++b) {
      for (int64_t h = 0; h < shape.heads; ++h) {
        for (int64_t q = 0; q < shape.q_len; ++q) {
          for (int64_t k = std::max<int64_t>(0, q + shape.query_offset + 1); k < shape.k_len; ++k) {
            later = later || count(b, h, q, k) > 0;
          }
        }
      }
    }
    if (sees_later(spec, shape) != later) RC_FAIL(to_string(shape) + "\n" + spec.text());
  }
}

TEST(Pattern, SeesLaterAssumesThatUnknownMapsDo) {
  const AttentionShape shape{1, 2, 1, 64, 64, 0};
  for (const std::string map : {"map = \"adaptive\", keep = 1", "map = \"file\", file = \"a.safetensors\""}) {
    const std::string member = "{ kind = \"blocks\", block = 16, " + map;
    const std::string both = "{ kind = \"union\", of = [{ kind = \"causal\" }, " + member;
    EXPECT_TRUE(sees_later(parse_pattern(member + " }", ""), shape));
    EXPECT_TRUE(sees_later(parse_pattern(both + " }] }", ""), shape));
    EXPECT_FALSE(sees_later(parse_pattern(member + ", causal = true }", ""), shape));
    EXPECT_FALSE(sees_later(parse_pattern(both + ", causal = true }] }", ""), shape));
    EXPECT_FALSE(sees_later(parse_pattern(both + " }], causal = true }", ""), shape));
  }
  EXPECT_THROW(sees_later(parse_pattern("{ kind = \"causal\", documents = [3] }", ""), shape), Error);
}

// Keys 2, 6, ... are 2 or more after queries 0, 4, ...: a band that ends at 1 holds none of the pairs.
TEST(Pattern, SeesLaterChecksPairsNotRanges) {
  const auto slices = [](int64_t hi) {
    return parse_pattern("{ kind = \"slices\", slices = [{ queries = [0, 4, 4], keys = [2, 4, 4], lo = 1, hi = " +
                             std::to_string(hi) + " }] }",
                         "");
  };
  const AttentionShape shape{1, 1, 1, 16, 16, 0};
  EXPECT_FALSE(sees_later(slices(1), shape));
  EXPECT_TRUE(sees_later(slices(2), shape));
}

TEST(Pattern, UnionIsAdaptiveIfAMemberIs) {
  const std::string adaptive = "{ kind = \"blocks\", map = \"adaptive\", keep = 1 }";
  EXPECT_TRUE(is_adaptive(parse_pattern(adaptive, "")));
  EXPECT_TRUE(is_adaptive(parse_pattern("{ kind = \"union\", of = [{ kind = \"full\" }, " + adaptive + "] }", "")));
  EXPECT_FALSE(is_adaptive(causal_pattern()));
}

// Any seed, and offsets that put query blocks before the first key block.
RC_GTEST_PROP(BlockMap, BigBirdUsesTheDocumentedGenerator, ()) {
  PatternSpec spec;
  spec.kind = PatternSpec::Kind::kBlocks;
  spec.causal = *rc::gen::arbitrary<bool>();
  BlocksSpec& b = spec.blocks;
  b.map = BlocksSpec::Map::kBigBird;
  b.block = 16;
  b.window_blocks = *rc::gen::inRange<int64_t>(0, 3);
  b.global_blocks = *rc::gen::inRange<int64_t>(0, 3);
  b.random_blocks = *rc::gen::inRange<int64_t>(0, 8);
  b.seed = *rc::gen::arbitrary<int64_t>();
  b.per_head = *rc::gen::arbitrary<bool>();
  const AttentionShape shape{1, 3, 1, 150, *rc::gen::inRange<int64_t>(1, 200), 16 * *rc::gen::inRange<int64_t>(-2, 3)};
  RC_LOG() << to_string(shape) << "\n" << spec.text() << "\n";
  RC_ASSERT(make_block_map(spec, shape).heads == (b.per_head && b.random_blocks > 0 ? 3 : 1));
  RC_ASSERT(difference(spec, shape) == "");
}

TEST(BlockMap, MembersOfCausalUnionsDrawPastBlocksOnly) {
  const AttentionShape shape{1, 2, 1, 1024, 1024, 0};
  PatternSpec spec = parse_pattern(
      "{ kind = \"blocks\", map = \"bigbird\", block = 16, window_blocks = 0, global_blocks = 0, random_blocks = 3 }",
      "");
  PatternSpec both;
  both.kind = PatternSpec::Kind::kUnion;
  both.members = {spec};
  PatternSpec outer = both;
  outer.causal = true;
  outer.members = {both};
  spec.causal = true;
  const int64_t pairs = count_pairs(make_pattern(spec, shape));
  EXPECT_EQ(count_pairs(make_pattern(outer, shape)), pairs);
  EXPECT_EQ(count_pairs(make_pattern(parse_pattern(outer.text(), ""), shape)), pairs);
}

TEST(BlockMap, BigBirdDrawIsStable) {
  PatternSpec spec = parse_pattern(
      "{ kind = \"blocks\", map = \"bigbird\", window_blocks = 1, global_blocks = 1, random_blocks = 2, seed = 7 }",
      "");
  const AttentionShape shape{1, 2, 1, 4096, 4096, 0};
  EXPECT_EQ(make_block_map(spec, shape).digest(), "d1b53c06c820f5775ec2c444fa97a508");
  spec.blocks.seed = 8;
  EXPECT_NE(make_block_map(spec, shape).digest(), "d1b53c06c820f5775ec2c444fa97a508");
}

RC_GTEST_PROP(BlockMap, DenseFormRoundTrips, ()) {
  AttentionShape shape = any_shape();
  const BlockMap map = testing::any_block_map(shape, 16);
  const std::vector<uint8_t> dense = map.dense();
  const BlockMap back = block_map_from_dense(dense.data(), 16, map.batch, map.heads, map.query_blocks, map.key_blocks);
  RC_ASSERT(back == map);
  RC_ASSERT(back.digest() == map.digest());
  const auto active = std::count(dense.begin(), dense.end(), uint8_t{1});
  RC_ASSERT(map.density() == (dense.empty() ? 0 : static_cast<double>(active) / static_cast<double>(dense.size())));
  if (dense.empty()) return;
  std::vector<uint8_t> other = dense;
  other[static_cast<size_t>(*rc::gen::inRange<int64_t>(0, static_cast<int64_t>(dense.size())))] ^= 1;
  RC_ASSERT(block_map_from_dense(other.data(), 16, map.batch, map.heads, map.query_blocks, map.key_blocks).digest() !=
            map.digest());
}

TEST(BlockMap, CausalLeavesOutFutureBlocks) {
  const AttentionShape shape{1, 1, 1, 70, 70, 0};
  PatternSpec spec = parse_pattern("{ kind = \"blocks\", map = \"local\", block = 16, window_blocks = 1 }", "");
  EXPECT_EQ(make_block_map(spec, shape).density(), 13.0 / 25);
  spec.causal = true;
  EXPECT_EQ(make_block_map(spec, shape).density(), 9.0 / 25);
}

}  // namespace
}  // namespace annulus::pattern_test
