// Tests of generation: cached decoding against a forward over the whole sequence, patterns as masks, the choice of
// tokens, and the text that a terminal gets.
#include "runtime/model/generator.h"

#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "attention/oracle/oracle.h"
#include "common/error.h"
#include "runtime/model/kv_cache.h"
#include "tests/common/exactness.h"
#include "tests/runtime/model/flat_parameters.h"

namespace annulus::generator_test {
namespace {

ModelShape tiny() { return {.layers = 2, .dim = 32, .heads = 4, .kv_heads = 2, .ffn = 48, .vocab = 64}; }

// In fp64, in which the same logits must come from cached keys as from all tokens at once.
Model lively_model() {
  Model model(tiny(), 3, at::kDouble);
  scale_matrices(model.parameters(), 5);
  return model;
}

std::vector<int64_t> some_tokens(int64_t n) {
  std::vector<int64_t> out;
  for (int64_t i = 0; i < n; ++i) out.push_back((i * i * 7 + 3 * i) % 64);
  return out;
}

// Returns the logits after the last token from all tokens at once. A query sees itself and
// `left` keys before it.
at::Tensor whole(const Model& model, std::vector<int64_t> tokens, int64_t left) {
  const auto n = static_cast<int64_t>(tokens.size());
  const at::Tensor row = at::from_blob(tokens.data(), {1, n}, at::kLong).clone();
  const at::Tensor i = at::arange(n).unsqueeze(1);
  const at::Tensor j = at::arange(n).unsqueeze(0);
  const at::Tensor mask = j.le(i).logical_and(j.ge(i.sub(left)));
  const Attend attend = [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t) {
    const auto heads_first = [](const at::Tensor& t, int64_t repeat) {
      return t.transpose(1, 2).repeat_interleave(repeat, 1);
    };
    return Attended{{at::scaled_dot_product_attention(heads_first(q, 1), heads_first(k, 2), heads_first(v, 2), mask)
                         .transpose(1, 2)
                         .contiguous()}};
  };
  return model.logits(row, model.rotary(at::arange(n)), attend, /*last_only=*/true)[0].detach();
}

// For models in fp64.
void expect_near(const at::Tensor& got, const at::Tensor& want) {
  EXPECT_EQ(got.scalar_type(), at::kDouble);
  EXPECT_TRUE(testing::agrees(got, want));
}

TEST(Generator, NarrowTypesAreAsExactAsTheFullForward) {
  const Model exact = lively_model();
  const std::vector<PatternSpec> pattern = {causal_pattern()};
  const at::Tensor want = whole(exact, some_tokens(40), 1000);
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    Model narrow(exact.shape(), 3, type);
    copy_values(exact.parameters(), narrow.parameters());
    const at::Tensor got = Generator(narrow, pattern, 100).feed(some_tokens(40));
    EXPECT_TRUE(testing::as_exact_as(got, whole(narrow, some_tokens(40), 1000), want)) << type;
  }
}

TEST(Generator, EqualsTheFullForward) {
  const Model model = lively_model();
  const std::vector<int64_t> tokens = some_tokens(300);  // more than one chunk of the prompt
  struct Case {
    const char* pattern;
    int64_t left;
  };
  for (const Case& c : {Case{"{ kind = \"causal\" }", 1000}, Case{"{ kind = \"window\", left = 5, right = 0 }", 5}}) {
    Generator generator(model, {parse_pattern(c.pattern, "test")}, 400);
    at::Tensor logits = generator.feed({tokens.begin(), tokens.begin() + 270});
    expect_near(logits, whole(model, {tokens.begin(), tokens.begin() + 270}, c.left));
    for (size_t i = 270; i < tokens.size(); ++i) {
      logits = generator.feed({tokens[i]});
      if (i % 10 == 9) expect_near(logits, whole(model, {tokens.begin(), tokens.begin() + i + 1}, c.left));
    }
    EXPECT_EQ(generator.length(), 300);
  }
}

// Returns the logits after the last token from all tokens at once, with the oracle's attention.
at::Tensor whole_by_oracle(const Model& model, std::vector<int64_t> tokens, const std::vector<PatternSpec>& patterns,
                           int64_t context) {
  const auto n = static_cast<int64_t>(tokens.size());
  const at::Tensor row = at::from_blob(tokens.data(), {1, n}, at::kLong).clone();
  const AttentionShape shape{.batch = 1, .heads = 4, .kv_heads = 2, .q_len = context, .k_len = context};
  const Attend attend = [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t layer) {
    const PatternSpec& spec = patterns[static_cast<size_t>(layer) % patterns.size()];
    AttentionShape selecting = shape;  // blocks are selected among the tokens that there are
    selecting.q_len = selecting.k_len = n;
    const Count count = is_adaptive(spec) ? count_of(spec, selecting, q, k) : count_of(spec, shape);
    return Attended{{oracle(q, k, v, at::zeros_like(q), 1 / std::sqrt(8.0), count).out}, output_divisor(spec)};
  };
  return model.logits(row, model.rotary(at::arange(n)), attend, /*last_only=*/true)[0].detach();
}

TEST(Generator, EveryPatternEqualsTheFullForward) {
  const c10::AutoGradMode no_grad(false);
  at::set_num_threads(1);
  const Model model = lively_model();
  const std::vector<int64_t> tokens = some_tokens(70);
  const auto spec = [](const char* toml) { return parse_pattern(toml, "test"); };
  const std::vector<std::vector<PatternSpec>> cases = {
      {spec("{ kind = 'dilated', segment_lengths = [16, 50], dilation_rates = [1, 3], causal = true }")},
      {spec(
          "{ kind = 'dilated', segment_lengths = [9, 40], dilation_rates = [1, 2], combine = 'mean', causal = true }")},
      {spec("{ kind = 'blocks', map = 'bigbird', block = 16, window_blocks = 1, global_blocks = 1, random_blocks = 1, "
            "causal = true }")},
      {spec("{ kind = 'causal', documents = [20, 33, 27] }")},
      {spec("{ kind = 'union', of = [{ kind = 'window', left = 4, right = 0 }, { kind = 'causal' }], causal = true }")},
      {spec("{ kind = 'blocks', map = 'adaptive', block = 16, keep = 2, query = 'first', causal = true }")},
      {spec("{ kind = 'union', of = [{ kind = 'window', left = 4, right = 0 }, { kind = 'blocks', map = 'adaptive', "
            "block = 16, keep = 2, query = 'first', causal = true }] }")},
      {spec("{ kind = 'union', of = [{ kind = 'window', left = 4, right = 0 }, { kind = 'blocks', map = 'adaptive', "
            "block = 16, keep = 2, query = 'first' }], causal = true }")},
      {spec("{ kind = 'window', left = 6, right = 0 }"),
       spec("{ kind = 'blocks', map = 'local', block = 32, window_blocks = 0, causal = true }")}};
  for (const std::vector<PatternSpec>& patterns : cases) {
    SCOPED_TRACE(patterns[0].text());
    Generator generator(model, patterns, 80);
    at::Tensor logits = generator.feed({tokens.begin(), tokens.begin() + 37});
    for (size_t i = 37; i < tokens.size(); ++i) {
      logits = generator.feed({tokens[i]});
      if (i % 8 != 7) continue;
      expect_near(logits, whole_by_oracle(model, {tokens.begin(), tokens.begin() + i + 1}, patterns, 80));
    }
  }
}

TEST(Generator, MeanSelectionUsesTheTokensSoFar) {
  const c10::AutoGradMode no_grad(false);
  at::set_num_threads(1);
  const Model model = lively_model();
  const std::vector<int64_t> tokens = some_tokens(75);
  const std::vector<PatternSpec> patterns = {
      parse_pattern("{ kind = 'blocks', map = 'adaptive', block = 16, keep = 2, causal = true }", "test")};
  // With all tokens at once the means are those of training; token by token they are those of the tokens so far.
  Generator at_once(model, patterns, 80);
  expect_near(at_once.feed(tokens), whole_by_oracle(model, tokens, patterns, 80));
  Generator one_by_one(model, patterns, 80);
  at::Tensor logits;
  for (const int64_t token : tokens) logits = one_by_one.feed({token});
  EXPECT_TRUE(logits.isfinite().all().item<bool>());
}

TEST(Generator, RefusesPatternsThatDoNotFitTheContext) {
  const Model model = lively_model();
  EXPECT_THROW(Generator(model, {parse_pattern("{ kind = 'causal', documents = [20, 30] }", "test")}, 80), Error);
}

TEST(Generator, KeepsTheLaterHalfOfAFullContext) {
  const Model model = lively_model();
  const std::vector<int64_t> tokens = some_tokens(50);
  Generator generator(model, {parse_pattern("{ kind = \"causal\" }", "test")}, 16);
  for (size_t i = 0; i < 16; ++i) generator.feed({tokens[i]});
  EXPECT_EQ(generator.length(), 16);
  expect_near(generator.feed({tokens[16]}), whole(model, {tokens.begin() + 9, tokens.begin() + 17}, 1000));
  EXPECT_EQ(generator.length(), 8);
  // A prompt longer than the context.
  Generator other(model, {parse_pattern("{ kind = \"causal\" }", "test")}, 16);
  expect_near(other.feed(tokens), whole(model, {tokens.end() - 8, tokens.end()}, 1000));
}

TEST(PatternBias, CountsPairs) {
  Pattern pattern{{.batch = 1, .heads = 2, .kv_heads = 1, .q_len = 2, .k_len = 3, .query_offset = 0},
                  {{.batch = {0, 1, 1}, .heads = {0, 1, 2}, .queries = {0, 1, 1}, .keys = {0, 2, 2}, .band = {}},
                   {.batch = {0, 1, 1}, .heads = {1, 1, 1}, .queries = {0, 1, 1}, .keys = {0, 1, 1}, .band = {}}}};
  bool empty = false;
  const at::Tensor bias = pattern_bias(pattern, 0, 2, 3, at::kDouble, &empty);
  EXPECT_TRUE(empty);
  const double inf = std::numeric_limits<double>::infinity();
  const at::Tensor counts = at::tensor({1., 0., 1., 0., 0., 0., 2., 0., 1., 0., 0., 0.}, at::kDouble).view({2, 2, 3});
  EXPECT_TRUE(testing::agrees(bias, counts.log()));
  EXPECT_EQ(bias[0][1][0].item<double>(), -inf);
}

TEST(Pick, TakesTheLargestWithoutTemperature) {
  const at::Tensor logits = at::tensor({1.0, 5.0, 3.0, 9.0});
  EXPECT_EQ(pick(logits, 4, {.temperature = 0}, 0), 3);
  EXPECT_EQ(pick(logits, 3, {.temperature = 0}, 0), 1);  // the token beyond the given vocabulary is not picked
  for (int64_t i = 0; i < 20; ++i) EXPECT_EQ(pick(logits, 4, {.temperature = 5, .top_k = 1}, i), 3);
}

TEST(Pick, FollowsTheDistribution) {
  const at::Tensor logits = at::tensor({std::log(0.5), std::log(0.3), std::log(0.2)});
  std::map<int64_t, int> counts;
  const int n = 4000;
  for (int64_t i = 0; i < n; ++i) ++counts[pick(logits, 3, {.seed = 7}, i)];
  const auto six_deviations = [&](double share) { return 6 * std::sqrt(share * (1 - share) * n); };
  EXPECT_NEAR(counts[0], 0.5 * n, six_deviations(0.5));
  EXPECT_NEAR(counts[1], 0.3 * n, six_deviations(0.3));
  counts.clear();
  for (int64_t i = 0; i < n; ++i) ++counts[pick(logits, 3, {.top_k = 2, .seed = 7}, i)];
  EXPECT_EQ(counts[2], 0);
  counts.clear();
  for (int64_t i = 0; i < n; ++i) ++counts[pick(logits, 3, {.top_p = 0.75, .seed = 7}, i)];
  EXPECT_NEAR(counts[0], 0.625 * n, six_deviations(0.625));
  EXPECT_EQ(counts[2], 0) << "the first two add up to 0.8";
  counts.clear();
  for (int64_t i = 0; i < n; ++i) ++counts[pick(logits, 3, {.top_p = 0.4, .seed = 7}, i)];
  EXPECT_EQ(counts[0], n) << "at least one token is kept";
  EXPECT_EQ(pick(logits, 3, {.seed = 9}, 4), pick(logits, 3, {.seed = 9}, 4));
}

std::string shown(std::string_view bytes) {
  Utf8Stream stream;
  std::string out;
  for (const char c : bytes) out += stream.push(static_cast<unsigned char>(c));
  return out + stream.finish();
}

TEST(Utf8Stream, PassesTextAndReplacesOtherBytes) {
  const std::string r = "\xEF\xBF\xBD";
  const std::string text = "def f():\n\treturn 'h\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80'";
  EXPECT_EQ(shown(text), text);
  EXPECT_EQ(shown(std::string("a\0b", 3)), "a" + r + "b");
  EXPECT_EQ(shown("\x1B[2J"), r + "[2J");
  EXPECT_EQ(shown("\x7F\r"), r + r);
  EXPECT_EQ(shown("\x80z"), r + "z");
  EXPECT_EQ(shown("\xC3z"), r + "z");
  EXPECT_EQ(shown("\xC3\xC3\xA9"), r + "\xC3\xA9");
  EXPECT_EQ(shown("\xE2\x82"), r);
  EXPECT_EQ(shown("\xC0\xAF"), r + r);          // overlong
  EXPECT_EQ(shown("\xED\xA0\x80"), r + r + r);  // a surrogate
  EXPECT_EQ(shown("\xF5"), r);
  EXPECT_EQ(shown("\xC2\x9B"), r);  // a control character in two bytes
}

}  // namespace
}  // namespace annulus::generator_test
