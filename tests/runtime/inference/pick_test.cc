// Tests of the choice of tokens, and of the text that a terminal gets (runtime/inference/generator.h).
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>

#include "runtime/inference/generator.h"

namespace annulus::pick_test {
namespace {

TEST(Pick, TakesTheLargestWithoutTemperature) {
  const at::Tensor logits = at::tensor({1.0, 5.0, 3.0, 9.0});
  EXPECT_EQ(pick(logits, 4, {.temperature = 0}, 0).token, 3);
  EXPECT_EQ(pick(logits, 3, {.temperature = 0}, 0).token, 1);  // the token beyond the given vocabulary is not picked
  for (int64_t i = 0; i < 20; ++i) EXPECT_EQ(pick(logits, 4, {.temperature = 5, .top_k = 1}, i).token, 3);
}

TEST(Pick, FollowsTheDistribution) {
  const at::Tensor logits = at::tensor({std::log(0.5), std::log(0.3), std::log(0.2)});
  std::map<int64_t, int> counts;
  const int n = 4000;
  for (int64_t i = 0; i < n; ++i) ++counts[pick(logits, 3, {.seed = 7}, i).token];
  const auto six_deviations = [&](double share) { return 6 * std::sqrt(share * (1 - share) * n); };
  EXPECT_NEAR(counts[0], 0.5 * n, six_deviations(0.5));
  EXPECT_NEAR(counts[1], 0.3 * n, six_deviations(0.3));
  counts.clear();
  for (int64_t i = 0; i < n; ++i) ++counts[pick(logits, 3, {.top_k = 2, .seed = 7}, i).token];
  EXPECT_EQ(counts[2], 0);
  counts.clear();
  for (int64_t i = 0; i < n; ++i) ++counts[pick(logits, 3, {.top_p = 0.75, .seed = 7}, i).token];
  EXPECT_NEAR(counts[0], 0.625 * n, six_deviations(0.625));
  EXPECT_EQ(counts[2], 0) << "the first two add up to 0.8";
  counts.clear();
  for (int64_t i = 0; i < n; ++i) ++counts[pick(logits, 3, {.top_p = 0.4, .seed = 7}, i).token];
  EXPECT_EQ(counts[0], n) << "at least one token is kept";
  EXPECT_EQ(pick(logits, 3, {.seed = 9}, 4).token, pick(logits, 3, {.seed = 9}, 4).token);
}

// A choice is near another one exactly if logits that are off by the bound can lead there.
TEST(Pick, SaysWhetherRoundingCouldHaveDecided) {
  const at::Tensor logits = at::tensor({1.0, 2.0, 1.99, -4.0}, at::kDouble);
  EXPECT_FALSE(pick(logits, 4, {.temperature = 0}, 0, 0.0049).near);
  EXPECT_TRUE(pick(logits, 4, {.temperature = 0}, 0, 0.0051).near);
  EXPECT_FALSE(pick(logits, 2, {.temperature = 0}, 0, 0.0051).near) << "the second best is not in the vocabulary";
  for (const Choice& choice : {Choice{.seed = 3}, Choice{.temperature = 0.5, .top_k = 3, .seed = 4},
                               Choice{.temperature = 2, .top_p = 0.6, .seed = 5}}) {
    const double off = 1e-3;
    int64_t near = 0, changed = 0;
    for (int64_t i = 0; i < 4000; ++i) {
      const Picked picked = pick(logits, 4, choice, i, off);
      near += picked.near;
      for (const double sign : {-1.0, 1.0}) {
        for (int64_t token = 0; token < 4; ++token) {
          at::Tensor moved = logits.clone();
          moved[token] += sign * off;
          if (pick(moved, 4, choice, i).token == picked.token) continue;
          ++changed;
          EXPECT_TRUE(picked.near) << choice.seed << ", draw " << i;
        }
      }
    }
    EXPECT_GT(changed, 0);
    // F (1 - F) (exp(2 off / T) - 1) is at most 1 / 4 * 4e-3 on each side of at most three ends.
    EXPECT_LT(choice.top_p == 1 ? static_cast<double>(near) : 0.0, 4000 * 3 * 2 * 2e-3);
  }
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
}  // namespace annulus::pick_test
