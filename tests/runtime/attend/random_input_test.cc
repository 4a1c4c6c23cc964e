// Tests of runtime/attend/random_input.h.
#include "runtime/attend/random_input.h"

#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <cmath>

#include "common/error.h"
#include "tests/common/expect_error.h"

namespace annulus::random_input_test {
namespace {

TEST(RandomInput, TextRoundTrips) {
  const std::string text = "batch=2,queries=30,keys=40,heads=4,kv_heads=2,dim=8,dtype=bf16,seed=9,magnitude=0.5";
  const RandomInput input = parse_random_input(text, "test");
  EXPECT_EQ(input.text(), text);
  EXPECT_EQ(input.shape(3), (AttentionShape{2, 4, 2, 30, 40, 3}));
  EXPECT_EQ(input.dtype, at::kBFloat16);
  EXPECT_EQ(parse_random_input("queries=30,heads=3", "test").text(),
            "batch=1,queries=30,keys=30,heads=3,kv_heads=3,dim=16,dtype=f32,seed=1");
}

TEST(RandomInput, HelpShowsTheDefaults) {
  std::string shown = random_input_defaults();
  for (const char* const name :
       {"batch=", ",queries=", ",keys=", ",heads=", ",kv_heads=", ",dim=", ",dtype=", ",seed=", ",magnitude="}) {
    EXPECT_NE(shown.find(name), std::string::npos) << name << " in " << shown;
  }
  const RandomInput input = parse_random_input("", "test");
  shown.replace(shown.find("QUERIES"), 7, std::to_string(input.queries));
  shown.replace(shown.find("HEADS"), 5, std::to_string(input.heads));
  EXPECT_EQ(parse_random_input(shown, "test").text(), input.text());
  EXPECT_EQ(parse_random_input(shown, "test").magnitude, input.magnitude);
}

TEST(RandomInput, RefusesInvalidText) {
  for (const auto& [text, word] :
       std::vector<std::pair<std::string, std::string>>{{"querys=30", "did you mean \"queries\""},
                                                        {"queries=x", "got \"x\""},
                                                        {"queries", "queries"},
                                                        {"queries=-1", "at least 0"},
                                                        {"heads=0", "at least 1"},
                                                        {"queries=3,heads=1,queries=4", "queries: is given twice"},
                                                        {"dtype=f32,dtype=f32", "dtype: is given twice"},
                                                        {"dtype=f33", "f32"},
                                                        {"magnitude=nan", "magnitude"},
                                                        {"queries=100000000,heads=8", "at most 134217728"}}) {
    expect_error(ErrorKind::kUsage, {word, "--random"}, [&] { parse_random_input(text, "--random"); });
  }
}

TEST(RandomInput, SameTextGivesTheSameTensors) {
  const RandomInput input = parse_random_input("queries=20,keys=30,heads=2,kv_heads=1,seed=4", "test");
  const RandomTensors a = make_random(input), b = make_random(input);
  EXPECT_TRUE(at::equal(a.q, b.q) && at::equal(a.k, b.k) && at::equal(a.v, b.v) && at::equal(a.dout, b.dout));
  EXPECT_EQ(a.q.sizes(), at::IntArrayRef({1, 20, 2, 16}));
  EXPECT_EQ(a.k.sizes(), at::IntArrayRef({1, 30, 1, 16}));
  EXPECT_FALSE(
      at::equal(a.q, make_random(parse_random_input("queries=20,keys=30,heads=2,kv_heads=1,seed=5", "test")).q));
  // The mean of n squares varies by the square root of 2 / n.
  EXPECT_NEAR(a.q.pow(2).mean().item<double>(), 1, 6 * std::sqrt(2 / static_cast<double>(a.q.numel())));
}

}  // namespace
}  // namespace annulus::random_input_test
