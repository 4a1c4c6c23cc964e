// Patterns: slices against the definitions, texts, refusals, block maps.
#include "attention/pattern/pattern.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <fstream>
#include <set>

#include "attention/oracle/oracle.h"
#include "common/error.h"
#include "tests/attention/any_pattern.h"

namespace annulus {
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

// The first pair that slices count otherwise than the definition; empty where all agree. Adds up all counts.
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
            if (s.band.contains(s.queries.at(i), s.keys.at(j))) {
              ++counts.at(static_cast<size_t>(s.queries.at(i) * shape.k_len + s.keys.at(j)));
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
  // Each kind, and each map of blocks, is to come often.
  for (int i = 0; i < 20; ++i) {
    const AttentionShape shape = any_shape();
    const PatternSpec spec = testing::any_pattern(shape);
    if (const std::string found = difference(spec, shape); !found.empty()) {
      RC_FAIL(to_string(shape) + "\n" + spec.text() + "\n" + found);
    }
  }
}

RC_GTEST_PROP(Pattern, GivenBlockMapsCountEveryPairAsTheyStand, ()) {
  const AttentionShape shape = any_shape();
  PatternSpec spec;
  spec.kind = PatternSpec::Kind::kBlocks;
  spec.causal = *rc::gen::arbitrary<bool>();
  spec.blocks = given_map(std::make_shared<const BlockMap>(testing::any_block_map(shape, 16)));
  RC_LOG() << to_string(shape) << "\n" << spec.text() << "\n";
  RC_ASSERT(difference(spec, shape) == "");
}

RC_GTEST_PROP(Pattern, ReadsWhatItWrites, ()) {
  const PatternSpec spec = testing::any_pattern(any_shape());
  RC_LOG() << spec.text() << "\n";
  const PatternSpec read = parse_pattern(spec.text(), "--pattern");
  RC_ASSERT(read.text() == spec.text());
}

TEST(Pattern, ReadsWhatItWritesOfEveryKey) {
  for (const char* text : {
           "{ kind = \"full\" }",
           "{ kind = \"causal\" }",
           "{ kind = \"causal\", documents = [700, 1348] }",
           "{ kind = \"documents\", documents = [[700, 1348], [2048, 0]] }",
           "{ kind = \"documents\", documents = [3, 4], key_documents = [5, 6] }",
           "{ kind = \"window\", left = 1023, right = 0 }",
           "{ kind = \"window\", left = 3, right = 4, causal = true, documents = [9] }",
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
           "{ kind = \"union\", of = [{ kind = \"causal\" }, { kind = \"window\", left = 1, right = 2 }], causal = "
           "true }",
           "{ kind = \"slices\", slices = [{ queries = [0, 1, 8], keys = [1, 2, 3] }, { queries = [0, 1, 8], keys = "
           "[1, 2, 3], heads = [0, 2, 2], batch = [1, 1, 1], lo = -3, hi = 4 }] }",
           "{ kind = \"slices\", slices = [] }",
       }) {
    EXPECT_EQ(parse_pattern(text, "--pattern").text(), text);
  }
}

TEST(Pattern, ReadsTheExamplesOfTheDocuments) {
  std::ifstream file("docs/attention.md");
  int examples = 0;
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("    { kind", 0) != 0) continue;
    EXPECT_NO_THROW(parse_pattern(line, "docs/attention.md")) << line;
    ++examples;
  }
  EXPECT_GE(examples, 19);  // every kind and every map
}

TEST(Pattern, OtherSpellingsHaveTheSameText) {
  EXPECT_EQ(parse_pattern("{ kind = \"full\", causal = true }", "").text(), "{ kind = \"causal\" }");
  EXPECT_EQ(parse_pattern("{ documents = [[3, 4]], causal = true, kind = \"documents\" }", "").text(),
            "{ kind = \"causal\", documents = [3, 4] }");
  EXPECT_EQ(parse_pattern("{ kind = \"blocks\", window_blocks = 1, map = \"local\" }", "").text(),
            "{ kind = \"blocks\", map = \"local\", block = 128, window_blocks = 1 }");
}

std::string nested(int depth) {
  return depth == 0 ? "{ kind = \"full\" }" : "{ kind = \"union\", of = [" + nested(depth - 1) + "] }";
}

TEST(Pattern, RefusesWhatNoShapeCouldHave) {
  const std::string dilated = "{ kind = \"dilated\", ", blocks = "{ kind = \"blocks\", ";
  const std::vector<std::pair<std::string, std::string>> wrong = {
      {"{ kind = \"casual\" }", "did you mean \"causal\""},
      {"{ kind = \"window\", left = 3, rigth = 4 }", "did you mean \"right\""},
      {"{ kind = \"window\", left = 3 }", "\"right\" is missing"},
      {"{ kind = \"window\", left = -1, right = 0 }", "between 0 and 2^40, got -1"},
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
      {blocks + "map = \"file\", file = \"\" }", "must name a file"},
      {"{ kind = \"documents\" }", "\"documents\" is missing"},
      {"{ kind = \"documents\", documents = [] }", "at least one length"},
      {"{ kind = \"documents\", documents = [[1], 2] }", "a list of such lists"},
      {"{ kind = \"documents\", documents = [5, -1] }", "at least 0, got -1"},
      {"{ kind = \"documents\", documents = [1099511627776, 1] }", "over 2^40"},
      {"{ kind = \"full\", key_documents = [5] }", "needs \"documents\""},
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

TEST(Pattern, RefusesWhatTheShapeCannotHave) {
  const std::string dilated = "{ kind = \"dilated\", segment_lengths = [8, 16], dilation_rates = [1, 2]";
  struct Case {
    std::string text;
    AttentionShape shape;
    std::string part;
  };
  const std::vector<Case> wrong = {
      {dilated + " }", {1, 2, 2, 16, 17, 0}, "as many keys as queries, got 16 queries and 17 keys"},
      {"{ kind = \"union\", of = [{ kind = \"full\" }, " + dilated + " }] }", {1, 2, 2, 16, 17, 0}, "as many keys"},
      {dilated + ", combine = \"mean\" }", {1, 1, 1, 16, 16, 0}, "at most 1 branches"},
      {"{ kind = \"documents\", documents = [5, 6] }", {1, 1, 1, 12, 12, 0}, "12 queries, but add up to 11"},
      {"{ kind = \"documents\", documents = [5, 6] }", {1, 1, 1, 11, 12, 0}, "need \"key_documents\""},
      {"{ kind = \"documents\", documents = [5, 6], key_documents = [13] }",
       {1, 1, 1, 11, 12, 0},
       "12 keys, but add up to 13"},
      {"{ kind = \"documents\", documents = [5, 6], key_documents = [12] }",
       {1, 1, 1, 11, 12, 0},
       "2 documents of queries and 1 of keys"},
      {"{ kind = \"documents\", documents = [[5], [5], [5]] }", {2, 1, 1, 5, 5, 0}, "one for each of the 2, got 3"},
      {"{ kind = \"blocks\", map = \"local\", window_blocks = 1, block = 16 }",
       {1, 1, 1, 32, 32, 8},
       "multiple of them, got 8"},
      {"{ kind = \"blocks\", map = \"adaptive\", keep = 1 }", {1, 1, 1, 32, 32, 0}, "selected from q and k"},
      {"{ kind = \"blocks\", map = \"file\", file = \"F\" }", {1, 1, 1, 32, 32, 0}, "F has not been read"},
      {"{ kind = \"slices\", slices = [{ queries = [0, 1, 8], keys = [0, 2, 5] }] }",
       {1, 1, 1, 8, 8, 0},
       "there are only 8"},
      // All there are can be said of heads and batch rows alone.
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
  // What a program fills in is checked as what is read.
  PatternSpec window;
  window.kind = PatternSpec::Kind::kWindow;
  window.left = -1;
  EXPECT_THROW(make_pattern(window, {1, 1, 1, 8, 8, 0}), Error);
  EXPECT_THROW(make_block_map(causal_pattern(), {1, 1, 1, 8, 8, 0}), Error);
  EXPECT_THROW(make_pattern(causal_pattern(), {1, 6, 4, 8, 8, 0}), Error);
}

// Whatever is too large to be made is refused before it is begun.
TEST(Pattern, ForeseesHowManySlicesThereCouldBe) {
  const auto verdict = [](const std::string& text, const AttentionShape& shape) -> std::string {
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
  EXPECT_EQ(verdict(dilated("1", "1"), tokens), "taken");
  EXPECT_THAT(verdict(dilated("1, 1", "1, 1"), tokens), HasSubstr("use longer segments"));
  EXPECT_THAT(verdict("{ kind = \"union\", of = [" + dilated("1", "1") + ", " + dilated("1", "1") + "] }", tokens),
              HasSubstr("2e+07 slices"));

  // Every second block, 512 runs for each of 1024 query blocks, and each of 4095 borders cuts 512 of them.
  std::string documents = "[4";
  for (int i = 1; i < 4096; ++i) documents += ", 4";
  documents += "]";
  const std::string strided =
      "{ kind = \"blocks\", map = \"strided\", block = 16, window_blocks = 0, stride = 2, documents = ";
  const AttentionShape rows{8, 1, 1, 1 << 14, 1 << 14, 0};
  EXPECT_EQ(verdict(strided + documents + " }", rows), "taken");
  std::string each = documents;
  for (int i = 1; i < 8; ++i) each += ", " + documents;
  EXPECT_THAT(verdict(strided + "[" + each + "] }", rows), HasSubstr("use fewer documents"));
  // A slice has no more parts than queries.
  EXPECT_EQ(verdict("{ kind = \"dilated\", segment_lengths = [16384], dilation_rates = [16384], documents = " +
                        documents + " }",
                    {1, 1 << 14, 1, 1 << 14, 1 << 14, 0}),
            "taken");

  // 2^4 query blocks for each of 2^60 heads.
  EXPECT_THAT(verdict("{ kind = \"blocks\", map = \"bigbird\", block = 16, window_blocks = 1, global_blocks = 0, "
                      "random_blocks = 1 }",
                      {1, int64_t{1} << 60, 1, 256, 256, 0}),
              HasSubstr("use larger blocks or fewer"));

  const AttentionShape large{8, 32, 8, 1 << 20, 1 << 20, 0};
  const auto adaptive = [](int64_t block, int64_t keep) {
    return "{ kind = \"blocks\", map = \"adaptive\", block = " + std::to_string(block) +
           ", keep = " + std::to_string(keep) + " }";
  };
  EXPECT_THAT(verdict(adaptive(16, 8), large), HasSubstr("use keep = 1 or less, or blocks of 128 or more"));
  EXPECT_EQ(verdict(adaptive(16, 1), large), "taken");
  EXPECT_EQ(verdict(adaptive(128, 8), large), "taken");
  EXPECT_EQ(verdict(adaptive(16, 1 << 16), large), "taken") << "all are kept: one map for all";
  EXPECT_THAT(verdict(adaptive(16, int64_t{1} << 15), {int64_t{1} << 60, 1, 1, 1 << 20, 1 << 20, 0}),
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
}

TEST(Pattern, RefusesAMapThatIsNotTheOneOfItsDigest) {
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
  // A text that hashed the map each time would be slow; one without a digest would be any map's.
  spec.blocks.digest = "";
  EXPECT_EQ(spec.text().find("digest"), std::string::npos);
  EXPECT_THROW(validate(spec, shape), Error);
}

size_t slices_of(const std::string& text, const AttentionShape& shape) {
  return make_pattern(parse_pattern(text, ""), shape).slices.size();
}

TEST(Pattern, TakesFewSlices) {
  const AttentionShape shape{2, 12, 4, 65536, 65536, 0};
  const std::string blocks = "{ kind = \"blocks\", map = ";  // 512 x 512 of them
  EXPECT_EQ(slices_of("{ kind = \"causal\" }", shape), 1u);
  EXPECT_EQ(slices_of("{ kind = \"documents\", documents = [30000, 1, 35535, 0] }", shape), 3u);
  // Rows with documents of their own; the window crosses none of the borders.
  EXPECT_EQ(slices_of("{ kind = \"window\", left = 9, right = 0, documents = [[65536], [65500, 36]] }", shape), 3u);
  // LongNet's base setting: for each segment a slice for each offset that a head has.
  EXPECT_EQ(slices_of("{ kind = \"dilated\", segment_lengths = [2048, 4096, 8192, 16384, 32768], dilation_rates = "
                      "[1, 2, 4, 6, 12] }",
                      shape),
            size_t{32 + 16 * 2 + 8 * 4 + 4 * 6 + 2 * 12});
  EXPECT_EQ(slices_of("{ kind = \"dilated\", segment_lengths = [1000000], dilation_rates = [1] }", shape), 1u);
  EXPECT_EQ(slices_of("{ kind = \"dilated\", segment_lengths = [65536], dilation_rates = [1000] }", shape), 12u);
  EXPECT_EQ(slices_of(blocks + "\"local\", window_blocks = 3 }", shape), 512u);
  // A row of globals, a column of them in two parts at most, and windows.
  EXPECT_LE(slices_of(blocks + "\"global-local\", window_blocks = 3, global_blocks = 2, causal = true }", shape), 515u);
  EXPECT_LE(slices_of(blocks + "\"global-local\", window_blocks = 3, global_blocks = 2 }", shape), 515u);
  // Columns of every 16 blocks are tall slices, cut where the window meets them.
  EXPECT_LE(slices_of(blocks + "\"strided\", window_blocks = 1, stride = 16 }", shape), size_t{512 + 3 * 32});
  EXPECT_LE(slices_of(blocks + "\"bigbird\", window_blocks = 1, global_blocks = 1, random_blocks = 2, per_head = "
                               "false }",
                      shape),
            size_t{512 * 4});
}

TEST(Pattern, CountsPairsOfHugeShapes) {
  const int64_t n = int64_t{1} << 30;
  EXPECT_EQ(count_pairs(make_pattern(causal_pattern(), {1, 1, 1, n, n, 0})), n * (n + 1) / 2);
  EXPECT_EQ(
      count_pairs(make_pattern(parse_pattern("{ kind = \"window\", left = 1023, right = 0 }", ""), {2, 3, 1, n, n, 0})),
      6 * (1024 * n - 1023 * 1024 / 2));
}

TEST(Pattern, MeanDividesByTheBranches) {
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

TEST(Pattern, IsAdaptiveWhereAMemberIs) {
  const std::string adaptive = "{ kind = \"blocks\", map = \"adaptive\", keep = 1 }";
  EXPECT_TRUE(is_adaptive(parse_pattern(adaptive, "")));
  EXPECT_TRUE(is_adaptive(parse_pattern("{ kind = \"union\", of = [{ kind = \"full\" }, " + adaptive + "] }", "")));
  EXPECT_FALSE(is_adaptive(causal_pattern()));
}

// The documented generator, once more and plainly: a list of what is eligible, from which blocks are taken.
std::set<int64_t> random_blocks(int64_t seed, int64_t head, int64_t query, int64_t wanted,
                                std::vector<int64_t> eligible) {
  const auto mix = [](uint64_t x) {
    x += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  };
  const uint64_t key =
      mix(mix(mix(static_cast<uint64_t>(seed)) ^ static_cast<uint64_t>(head)) ^ static_cast<uint64_t>(query));
  std::set<int64_t> drawn;
  for (uint64_t t = 0; t < static_cast<uint64_t>(wanted) && !eligible.empty(); ++t) {
    const auto it = eligible.begin() + static_cast<ptrdiff_t>(mix(key + t) % eligible.size());
    drawn.insert(*it);
    eligible.erase(it);
  }
  return drawn;
}

RC_GTEST_PROP(BlockMap, BigBirdDrawsByTheDocumentedGenerator, ()) {
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
  const int64_t offset = *rc::gen::inRange<int64_t>(-2, 3);
  const AttentionShape shape{1, 3, 1, 150, *rc::gen::inRange<int64_t>(1, 200), offset * 16};
  const BlockMap map = make_block_map(spec, shape);
  RC_ASSERT(map.heads == (b.per_head && b.random_blocks > 0 ? 3 : 1));
  const std::vector<uint8_t> active = map.dense();
  for (int64_t h = 0; h < map.heads; ++h) {
    for (int64_t i = 0; i < map.query_blocks; ++i) {
      const int64_t query = i + offset;
      std::set<int64_t> want;
      std::vector<int64_t> eligible;
      const bool is_global = query >= 0 && query < b.global_blocks && !spec.causal;
      for (int64_t j = 0; j < map.key_blocks; ++j) {
        if (spec.causal && j > query) continue;
        if (is_global || j < b.global_blocks || std::abs(query - j) <= b.window_blocks) {
          want.insert(j);
        } else {
          eligible.push_back(j);
        }
      }
      want.merge(random_blocks(b.seed, h, query, b.random_blocks, eligible));
      std::set<int64_t> got;
      for (int64_t j = 0; j < map.key_blocks; ++j) {
        if (active[static_cast<size_t>((h * map.query_blocks + i) * map.key_blocks + j)]) got.insert(j);
      }
      RC_ASSERT(got == want);
    }
  }
}

TEST(BlockMap, AMemberOfACausalUnionDrawsFromThePast) {
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

TEST(BlockMap, BigBirdKeepsItsDraw) {
  PatternSpec spec = parse_pattern(
      "{ kind = \"blocks\", map = \"bigbird\", window_blocks = 1, global_blocks = 1, random_blocks = 2, seed = 7 }",
      "");
  const AttentionShape shape{1, 2, 1, 4096, 4096, 0};
  EXPECT_EQ(make_block_map(spec, shape).digest(), "d1b53c06c820f5775ec2c444fa97a508");
  spec.blocks.seed = 8;
  EXPECT_NE(make_block_map(spec, shape).digest(), "d1b53c06c820f5775ec2c444fa97a508");
}

RC_GTEST_PROP(BlockMap, GoesToDenseAndBack, ()) {
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
}  // namespace annulus
