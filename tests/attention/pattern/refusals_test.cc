// Tests of which patterns are refused: for every shape, for a given shape, and because they could have too many slices.
#include "attention/pattern/pattern.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <set>

#include "common/error.h"

namespace annulus::refusals_test {
namespace {

std::string nested(int depth) {
  return depth == 0 ? "{ kind = \"full\" }" : "{ kind = \"union\", of = [" + nested(depth - 1) + "] }";
}

TEST(Pattern, RefusesInvalidPatterns) {
  const std::string dilated = "{ kind = \"dilated\", ", blocks = "{ kind = \"blocks\", ";
  const std::vector<std::pair<std::string, std::string>> wrong = {
      {"{ kind = \"casual\" }", "did you mean \"causal\""},
      {"{ kind = \"window\", left = 3, rigth = 4 }", "did you mean \"right\""},
      {"{ kind = \"window\", left = 3 }", "\"right\" is missing"},
      {"{ kind = \"window\", left = -2, right = 0 }",
       "between 0 and 2^40, got -2; -1 stands for a side without a bound"},
      {"{ kind = \"window\", left = 3, right = 0, sink_tokens = -1 }", "\"sink_tokens\" must be between 0 and 2^40"},
      {"{ kind = \"causal\", sink_tokens = 4 }", "kind \"causal\" has no key \"sink_tokens\""},
      {"{ kind = \"window\", left = 1.5, right = 0 }", "whole number"},
      {"{ kind = \"full\", causal = 1 }", "true or false"},
      {"{ kind = \"causal\", causal = false }", "use kind = \"full\""},
      {"{ causal = true }", "kind"},
      {"causal", "inline table"},
      {"{ kind = \"full\" }\nother = 3", "inline table"},
      {"", "inline table"},
      {dilated + "segment_lengths = [8] }", "\"dilation_rates\" is missing"},
      {dilated + "segment_lengths = [8, 16], dilation_rates = [1] }", "2 segment_lengths and 1 dilation_rates"},
      {dilated + "segment_lengths = [], dilation_rates = [] }", "needs a branch"},
      {dilated + "segment_lengths = [0], dilation_rates = [1] }", "between 1 and 2^40, got 0"},
      {dilated + "segment_lengths = [1099511627777], dilation_rates = [1] }", "between 1 and 2^40"},
      {dilated + "segment_lengths = [8], dilation_rates = [9] }", "between 1 and 8, got 9"},
      {dilated + "segment_lengths = [8], dilation_rates = [0] }", "between 1 and 8, got 0"},
      {dilated + "segment_lengths = 8, dilation_rates = [1] }", "a list of whole numbers"},
      {dilated + "segment_lengths = [8], dilation_rates = [1], combine = \"maen\" }", "did you mean \"mean\""},
      {dilated + "segment_lengths = [8], dilation_rates = [1], left = 3 }", "no key \"left\""},
      {blocks + "block = 128 }", "\"map\" is missing"},
      {blocks + "map = \"bigbrid\" }", "did you mean \"bigbird\""},
      {blocks + "map = \"given\" }", "unknown map"},
      {blocks + "map = \"local\", window_blocks = 1, rate = 2 }", "map \"local\" has no key \"rate\""},
      {blocks + "map = \"local\", windwo_blocks = 1 }", "did you mean \"window_blocks\""},
      {blocks + "map = \"local\" }", "\"window_blocks\" is missing"},
      {blocks + "map = \"local\", window_blocks = -1 }", "between 0 and 2^40, got -1"},
      {blocks + "map = \"local\", window_blocks = 1, block = 24 }", "multiple of 16"},
      {blocks + "map = \"local\", window_blocks = 1, block = 0 }", "multiple of 16"},
      {blocks + "map = \"dilated\", window_blocks = 1, rate = 0 }", "between 1 and 2^40, got 0"},
      {blocks + "map = \"strided\", window_blocks = 1, stride = 0 }", "between 1 and 2^40, got 0"},
      {blocks + "map = \"hierarchical\", levels = [] }", "at least one [stride, reach]"},
      {blocks + "map = \"hierarchical\", levels = [[1]] }", "[stride, reach]"},
      {blocks + "map = \"hierarchical\", levels = [[0, 1]] }", "got [0, 1]"},
      {blocks + "map = \"adaptive\", keep = 0 }", "between 1 and 2^40, got 0"},
      {blocks + "map = \"adaptive\", keep = 2, query = \"last\" }", "known: mean, first"},
      {blocks + "map = \"file\", file = \"\" }", "must name a safetensors file"},
      {"{ kind = \"documents\" }", "\"documents\" is missing"},
      {"{ kind = \"documents\", documents = [] }", "at least one length"},
      {"{ kind = \"documents\", documents = [[1], 2] }", "a list of such lists"},
      {"{ kind = \"documents\", documents = [5, -1] }", "at least 0, got -1"},
      {"{ kind = \"documents\", documents = [1099511627776, 1] }", "over 2^40"},
      {"{ kind = \"full\", key_documents = [5] }", "needs \"documents\""},
      {"{ kind = \"tree\", lengths = [3] }", "\"parents\" is missing"},
      {"{ kind = \"tree\", lengths = [], parents = [] }", "each of at least one length"},
      {"{ kind = \"tree\", lengths = [3], parents = [[]] }", "as in [-1, 0, 0], or a list of such lists"},
      {"{ kind = \"tree\", lengths = [3, 4], parents = [-1] }", "got 2 lengths and 1 parent"},
      {"{ kind = \"tree\", lengths = [[3], [3]], parents = [-1] }", "got 2 lists of lengths and 1 of parents"},
      {"{ kind = \"tree\", lengths = [3, -4], parents = [-1, 0] }", "node 1 of a tree must have a length"},
      {"{ kind = \"tree\", lengths = [1099511627776, 1], parents = [-1, 0] }", "over 2^40"},
      {"{ kind = \"tree\", lengths = [1, 1], parents = [0, -1] }",
       "node 0 of a tree cannot have the parent 0: the first node is a root, which has the parent -1"},
      {"{ kind = \"tree\", lengths = [1, 1, 1], parents = [-1, 2, 0] }",
       "node 1 of a tree cannot have the parent 2, which comes after it: nodes are in depth-first order, so its parent "
       "is node 0, an ancestor of that node, or -1 for a root"},
      {"{ kind = \"tree\", lengths = [1, 1], parents = [-1, -2] }", "node 1 of a tree cannot have the parent -2"},
      {"{ kind = \"tree\", lengths = [1, 1, 1, 1], parents = [-1, 0, 0, 1] }",
       "node 3 of a tree cannot have the parent 1: nodes are in depth-first order, so its parent is node 2"},
      {"{ kind = \"tree\", lengths = [[2], [1, 1]], parents = [[-1], [-1, 1]] }", "batch row 1: node 1 of a tree"},
      {"{ kind = \"union\", of = [] }", "needs members"},
      {"{ kind = \"union\", of = [{ kind = \"ful\" }] }", "member 1: unknown kind"},
      {"{ kind = \"bigbird\" }", "map = \"bigbird\""},
      {"{ kind = \"union\", of = [" + dilated + "segment_lengths = [8], dilation_rates = [1], combine = \"mean\" }] }",
       "use combine = \"lse\""},
      {nested(9), "nested 8 deep"},
      {"{ kind = \"slices\", slices = [{ queries = [0, 1, 2] }] }", "\"keys\" is missing"},
      {"{ kind = \"slices\", slices = [{ queries = [0, 1], keys = [0, 1, 2] }] }", "[begin, stride, count]"},
      {"{ kind = \"slices\", slices = [{ queries = [0, 0, 2], keys = [0, 1, 2] }] }", "stride of at least 1"},
      {"{ kind = \"slices\", slices = [{ queries = [0, 1, 2], keys = [0, 1, 2], head = [0, 1, 1] }] }",
       "did you mean \"heads\""},
  };
  for (const auto& [text, part] : wrong) {
    try {
      parse_pattern(text, "--pattern");
      ADD_FAILURE() << text << " was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUsage);
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("--pattern"), std::string::npos) << error.what();
    }
  }
  EXPECT_NO_THROW(parse_pattern(nested(8), ""));
}

TEST(Pattern, RefusesPatternsThatDoNotFitTheShape) {
  const std::string dilated = "{ kind = \"dilated\", segment_lengths = [8, 16], dilation_rates = [1, 2]";
  struct Case {
    std::string text;
    AttentionShape shape;
    std::string part;
  };
  const std::vector<Case> wrong = {
      {dilated + ", combine = \"mean\" }",
       {1, 1, 1, 16, 16, 0},
       "1 head cannot be split into 2 groups; use at most 1 branch, or"},
      {"{ kind = \"causal\" }",
       {1, (1 << 24) + 1, 1, 8, 8, 0},
       "at most 2^24, got 1 batch row and 16777217 query heads"},
      {"{ kind = \"causal\" }",
       {(1 << 24) + 1, 1, 1, 8, 8, 0},
       "at most 2^24, got 16777217 batch rows and 1 query head"},
      {"{ kind = \"causal\" }", {1 << 24, 1 << 24, 1, 1 << 15, 1 << 15, 0}, "more than 2^63 rows"},
      {"{ kind = \"documents\", documents = [5, 6] }", {1, 1, 1, 12, 12, 0}, "12 queries, but add up to 11"},
      {"{ kind = \"documents\", documents = [5, 6] }", {1, 1, 1, 11, 12, 0}, "need \"key_documents\""},
      {"{ kind = \"documents\", documents = [5, 6], key_documents = [13] }",
       {1, 1, 1, 11, 12, 0},
       "12 keys, but add up to 13"},
      {"{ kind = \"documents\", documents = [5, 6], key_documents = [12] }",
       {1, 1, 1, 11, 12, 0},
       "2 documents of queries and 1 of keys"},
      {"{ kind = \"documents\", documents = [[5], [5], [5]] }", {2, 1, 1, 5, 5, 0}, "one for each of the 2, got 3"},
      {"{ kind = \"tree\", lengths = [5], parents = [-1] }", {1, 1, 1, 6, 6, 0}, "6 queries, but add up to 5"},
      {"{ kind = \"tree\", lengths = [5], parents = [-1] }",
       {1, 1, 1, 5, 6, 0},
       "got 5 queries, 6 keys and the offset 0"},
      {"{ kind = \"tree\", lengths = [5], parents = [-1] }", {1, 1, 1, 5, 5, 1}, "5 keys and the offset 1"},
      {"{ kind = \"tree\", lengths = [[5], [5], [5]], parents = [[-1], [-1], [-1]] }",
       {2, 1, 1, 5, 5, 0},
       "one for each of the 2, got 3"},
      {"{ kind = \"blocks\", map = \"local\", window_blocks = 1, block = 16 }",
       {1, 1, 1, 32, 32, 8},
       "multiple of them, got 8"},
      {"{ kind = \"blocks\", map = \"adaptive\", keep = 1 }", {1, 1, 1, 32, 32, 0}, "selected from q and k"},
      {"{ kind = \"blocks\", map = \"file\", file = \"F\" }", {1, 1, 1, 32, 32, 0}, "F has not been read"},
      {"{ kind = \"slices\", slices = [{ queries = [0, 1, 8], keys = [0, 2, 5] }] }",
       {1, 1, 1, 8, 8, 0},
       "there are only 8"},
      // The length 2^40, which stands for all, is allowed for heads and batch rows only.
      {"{ kind = \"slices\", slices = [{ queries = [0, 1, 1099511627776], keys = [0, 1, 8] }] }",
       {1, 1, 1, 8, 8, 0},
       "there are only 8"},
      {"{ kind = \"slices\", slices = [{ queries = [0, 1, 8], keys = [0, 1, 1099511627776] }] }",
       {1, 1, 1, 8, 8, 0},
       "there are only 8"},
      {"{ kind = \"slices\", slices = [{ queries = [0, 1, 8], keys = [0, 1, 8], heads = [0, 1, 2] }] }",
       {1, 1, 1, 8, 8, 0},
       "there are only 1"},
      {"{ kind = \"dilated\", segment_lengths = [1], dilation_rates = [1] }",
       {1, 1, 1, int64_t{1} << 40, int64_t{1} << 40, 0},
       "use longer segments"},
      {"{ kind = \"blocks\", map = \"local\", window_blocks = 1, block = 16 }",
       {1, 1, 1, int64_t{1} << 40, int64_t{1} << 40, 0},
       "use larger blocks or fewer"},
      {"{ kind = \"blocks\", map = \"strided\", window_blocks = 0, stride = 2, block = 16 }",
       {1, 1, 1, 1 << 20, 1 << 20, 0},
       "use larger blocks or fewer"},
  };
  for (const auto& [text, shape, part] : wrong) {
    try {
      make_pattern(parse_pattern(text, "--pattern"), shape);
      ADD_FAILURE() << text << " was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kPlan);
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  }
  // A spec that a program fills in is checked like one that is read from text.
  PatternSpec window;
  window.kind = PatternSpec::Kind::kWindow;
  window.left = -2;
  EXPECT_THROW(make_pattern(window, {1, 1, 1, 8, 8, 0}), Error);
  EXPECT_THROW(make_block_map(causal_pattern(), {1, 1, 1, 8, 8, 0}), Error);
  EXPECT_THROW(make_pattern(causal_pattern(), {1, 6, 4, 8, 8, 0}), Error);
}

// A pattern that would be too large is refused before any of it is made.
TEST(Pattern, RefusesTooManySlicesBeforeMakingThem) {
  const auto outcome = [](const std::string& text, const AttentionShape& shape) -> std::string {
    try {
      validate(parse_pattern(text, "--pattern"), shape);
      return "taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kPlan);
      return error.what();
    }
  };
  const auto dilated = [](const std::string& lengths, const std::string& rates) {
    return "{ kind = \"dilated\", segment_lengths = [" + lengths + "], dilation_rates = [" + rates + "] }";
  };
  using ::testing::HasSubstr;
  const int64_t million = 1'000'000;
  const AttentionShape tokens{1, 1, 1, 10 * million, 10 * million, 0};
  EXPECT_EQ(outcome(dilated("1", "1"), tokens), "taken");
  EXPECT_THAT(outcome(dilated("1, 1", "1, 1"), tokens), HasSubstr("use longer segments"));
  EXPECT_THAT(outcome("{ kind = \"union\", of = [" + dilated("1", "1") + ", " + dilated("1", "1") + "] }", tokens),
              HasSubstr("2e+07 slices"));

  // Every second block is active: 512 runs for each of 1024 query blocks, and each of 4095 borders cuts 512 of them.
  std::string documents = "[4";
  for (int i = 1; i < 4096; ++i) documents += ", 4";
  documents += "]";
  const std::string strided =
      "{ kind = \"blocks\", map = \"strided\", block = 16, window_blocks = 0, stride = 2, documents = ";
  const AttentionShape rows{8, 1, 1, 1 << 14, 1 << 14, 0};
  EXPECT_EQ(outcome(strided + documents + " }", rows), "taken");
  std::string each = documents;
  for (int i = 1; i < 8; ++i) each += ", " + documents;
  EXPECT_THAT(outcome(strided + "[" + each + "] }", rows), HasSubstr("use fewer documents"));
  // A slice does not have more parts than queries.
  EXPECT_EQ(outcome("{ kind = \"dilated\", segment_lengths = [16384], dilation_rates = [16384], documents = " +
                        documents + " }",
                    {1, 1 << 14, 1, 1 << 14, 1 << 14, 0}),
            "taken");

  // Documents cut the nodes of a tree, however deep it is, at each border once.
  std::string chain = "[-1";
  for (int i = 0; i < 4095; ++i) chain += ", " + std::to_string(i);
  const std::string tree = "{ kind = \"tree\", lengths = " + documents + ", parents = " + chain + "]";
  EXPECT_EQ(outcome(tree + ", documents = " + documents + " }", {1 << 11, 1, 1, 1 << 14, 1 << 14, 0}), "taken");
  EXPECT_EQ(outcome(tree + ", documents = [" + each + "] }", rows), "taken");

  // 2^22 query blocks for each of 2^24 heads.
  EXPECT_THAT(outcome("{ kind = \"blocks\", map = \"bigbird\", block = 16, window_blocks = 1, global_blocks = 0, "
                      "random_blocks = 1 }",
                      {1, int64_t{1} << 24, 1, int64_t{1} << 26, int64_t{1} << 26, 0}),
              HasSubstr("use larger blocks or fewer"));

  const AttentionShape large{8, 32, 8, 1 << 20, 1 << 20, 0};
  const auto adaptive = [](int64_t block, int64_t keep) {
    return "{ kind = \"blocks\", map = \"adaptive\", block = " + std::to_string(block) +
           ", keep = " + std::to_string(keep) + " }";
  };
  EXPECT_THAT(outcome(adaptive(16, 8), large), HasSubstr("use keep = 1 or less, or blocks of 128 or more"));
  EXPECT_EQ(outcome(adaptive(16, 1), large), "taken");
  EXPECT_EQ(outcome(adaptive(128, 8), large), "taken");
  EXPECT_EQ(outcome(adaptive(16, 1 << 16), large), "taken") << "all blocks are kept: one plane serves all heads";
  EXPECT_THAT(outcome(adaptive(16, int64_t{1} << 15), {1 << 24, 1, 1, 1 << 20, 1 << 20, 0}),
              HasSubstr("use fewer batch rows or heads"));
}

TEST(Pattern, RefusesBlockMapsOfAnotherShape) {
  const AttentionShape shape{2, 4, 2, 100, 100, 0};
  const auto taken = [&](int64_t block, int64_t batch, int64_t heads, int64_t query_blocks, int64_t key_blocks) {
    const std::vector<uint8_t> active(static_cast<size_t>(batch * heads * query_blocks * key_blocks), 1);
    PatternSpec spec;
    spec.kind = PatternSpec::Kind::kBlocks;
    spec.blocks = given_map(std::make_shared<const BlockMap>(
        block_map_from_dense(active.data(), block, batch, heads, query_blocks, key_blocks)));
    spec.blocks.block = 16;
    try {
      make_pattern(spec, shape);
      return true;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kPlan);
      EXPECT_NE(std::string(error.what()).find("[2 or 1, 4 or 1, 7, 7]"), std::string::npos) << error.what();
      return false;
    }
  };
  EXPECT_TRUE(taken(16, 1, 1, 7, 7));
  EXPECT_TRUE(taken(16, 2, 4, 7, 7));
  EXPECT_FALSE(taken(32, 1, 1, 7, 7));
  EXPECT_FALSE(taken(16, 3, 1, 7, 7));
  EXPECT_FALSE(taken(16, 1, 2, 7, 7));
  EXPECT_FALSE(taken(16, 1, 1, 6, 7));
  EXPECT_FALSE(taken(16, 1, 1, 7, 8));
  EXPECT_EQ(block_map_shapes(1, 4, 16, 17), "[1, 4 or 1, 16, 17]");
}

TEST(Pattern, RefusesBlockMapsThatDoNotMatchTheirDigest) {
  const AttentionShape shape{1, 1, 1, 32, 32, 0};
  PatternSpec spec;
  spec.kind = PatternSpec::Kind::kBlocks;
  const std::vector<uint8_t> active = {1, 0, 1, 1};
  spec.blocks = given_map(std::make_shared<const BlockMap>(block_map_from_dense(active.data(), 16, 1, 1, 2, 2)));
  EXPECT_EQ(spec.blocks.digest, spec.blocks.given->digest());
  EXPECT_NE(spec.text().find(spec.blocks.digest), std::string::npos);
  EXPECT_EQ(make_pattern(spec, shape).slices.size(), 2u);
  spec.blocks.digest = "0123";
  EXPECT_THROW(make_pattern(spec, shape), Error);
  // text() does not hash the map, which would be slow. A map without a digest is refused: its text would name any map.
  spec.blocks.digest = "";
  EXPECT_EQ(spec.text().find("digest"), std::string::npos);
  EXPECT_THROW(validate(spec, shape), Error);
}

}  // namespace
}  // namespace annulus::refusals_test
