// Tests of runtime/attend/random_input.h.
#include "runtime/attend/random_input.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "attention/oracle/draws.h"
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
  for (const auto& [text, word] : std::vector<std::pair<std::string, std::string>>{
           {"querys=30", "did you mean \"queries\""},
           {"queries=x", "got \"x\""},
           {"queries", "queries"},
           {"queries=-1", "at least 0"},
           {"heads=0", "at least 1"},
           {"queries=3,heads=1,queries=4", "queries: is given twice"},
           {"dtype=f32,dtype=f32", "dtype: is given twice"},
           {"dtype=f33", "f32"},
           {"magnitude=nan", "magnitude"},
           {"queries=1000000000000,heads=1000000000,dim=64", "at most 2^62"}}) {
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

TEST(RandomInput, APositionHasTheSameNumbersWhicheverOthersAreMade) {
  for (const char* const sizes : {"batch=2,queries=20,keys=30,heads=1,dim=3,seed=4",  // an odd number to a row
                                  "batch=1,queries=9000,keys=50,heads=4,kv_heads=2,dtype=bf16,magnitude=3"}) {
    const RandomInput input = parse_random_input(sizes, "test");
    const RandomTensors all = make_random(input);
    const RandomTensors part = make_random(input, {{1, 3, 5}, {4, 1, 2}}, {{29, 1, 1}, {0, 7, 4}});
    const auto rows = [](const at::Tensor& t, const std::vector<int64_t>& positions) {
      std::vector<at::Tensor> parts;
      for (const int64_t p : positions) parts.push_back(t.slice(1, p, p + 1));
      return at::cat(parts, 1);
    };
    EXPECT_TRUE(at::equal(part.q, rows(all.q, {1, 4, 7, 10, 13, 4, 5})));
    EXPECT_TRUE(at::equal(part.dout, rows(all.dout, {1, 4, 7, 10, 13, 4, 5})));
    EXPECT_TRUE(at::equal(part.k, rows(all.k, {29, 0, 7, 14, 21})));
    EXPECT_TRUE(at::equal(part.v, rows(all.v, {29, 0, 7, 14, 21})));
  }
}

// 2^43 elements; no rank has more than its own.
TEST(RandomInput, MakesPartsOfWhatNoMachineHolds) {
  const RandomInput input = parse_random_input("queries=137438953472,dim=16", "test");
  const RandomTensors last = make_random(input, {{input.queries - 4096, 1, 4096}}, {{0, 1, 4096}});
  EXPECT_EQ(last.q.sizes(), at::IntArrayRef({1, 4096, 1, 16}));
  EXPECT_FALSE(at::equal(last.q, last.k));
  for (const at::Tensor* const t : {&last.q, &last.k, &last.v, &last.dout}) {
    const auto n = static_cast<double>(t->numel());
    // The means of n normal numbers and of their squares vary by the square roots of 1 / n and 2 / n.
    EXPECT_NEAR(t->mean().item<double>(), 0, 6 * std::sqrt(1 / n));
    EXPECT_NEAR(t->pow(2).mean().item<double>(), 1, 6 * std::sqrt(2 / n));
    // Neighbours, of one draw and of two, are independent: the mean of their products varies by the square root of 1 /
    // n.
    const at::Tensor flat = t->flatten();
    for (const int64_t apart : {1, 2}) {
      const at::Tensor products = flat.slice(0, 0, -apart) * flat.slice(0, apart);
      EXPECT_NEAR(products.mean().item<double>(), 0, 6 * std::sqrt(1 / n));
    }
  }
}

// The definition that the header states, from its first words.
TEST(RandomInput, NumbersAreThoseOfTheDefinition) {
  const RandomTensors in = make_random(parse_random_input("queries=2,dim=2,dtype=f64,seed=9,magnitude=2", "test"));
  const auto words = oracle_draws::philox4x32_10({1, 0, 1, 0}, {9, 0});  // elements 2 and 3 of k
  const auto fraction = [&](size_t i) {
    return static_cast<double>(((uint64_t{words[i + 1]} << 32 | words[i]) >> 11) + 1) / 0x1p53;
  };
  const double radius = 2 * std::sqrt(-2 * std::log(fraction(0))), angle = 2 * std::acos(-1.0) * fraction(2);
  EXPECT_NEAR(in.k[0][1][0][0].item<double>(), radius * std::cos(angle), 1e-12);
  EXPECT_NEAR(in.k[0][1][0][1].item<double>(), radius * std::sin(angle), 1e-12);
}

}  // namespace
}  // namespace annulus::random_input_test
