// Tests of common/svg/stacked_bars.h: lengths of bars and of their parts, the line of the limit, and what is cut.
#include "common/svg/stacked_bars.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "common/error.h"
#include "common/svg/palette.h"
#include "common/text.h"
#include "tests/common/expect_error.h"
#include "tests/common/svg/parsed_svg.h"

namespace annulus::stacked_bars_test {
namespace {

using testing::parse_svg;
using testing::ParsedBox;
using testing::ParsedSvg;

StackedBars bars_of(std::vector<StackedBar> bars, double limit) {
  StackedBars all;
  all.title = "a title";
  all.subtitle = "a subtitle";
  all.description = "a description";
  all.kinds = {"weights", "gradients"};
  all.bars = std::move(bars);
  all.limit = limit;
  all.limit_name = "a device";
  all.text = [](double amount) { return bytes_text(amount); };
  return all;
}

ParsedSvg sound(const StackedBars& bars) {
  const std::string svg = stacked_bars_svg(bars);
  EXPECT_EQ(testing::xml_fault(svg), "");
  ParsedSvg picture = parse_svg(svg);
  EXPECT_EQ(testing::layout_fault(picture), "");
  return picture;
}

// The boxes of a colour that are bars, not swatches of the legend.
std::vector<ParsedBox> parts(const ParsedSvg& picture, std::string_view fill) {
  std::vector<ParsedBox> out;
  for (const ParsedBox& box : picture.boxes) {
    if (box.fill == fill && box.height == 20) out.push_back(box);
  }
  return out;
}

TEST(StackedBars, PartsAreAsLongAsTheirAmounts) {
  const ParsedSvg picture = sound(
      bars_of({{"shard 0", "keeps all", {4e9, 8e9}, "12.0 GB"}, {"shard 1", "keeps all", {2e9, 4e9}, "6.0 GB"}}, 16e9));
  const auto weights = parts(picture, kHues[0].line), gradients = parts(picture, kHues[1].line);
  ASSERT_EQ(weights.size(), 2U);
  ASSERT_EQ(gradients.size(), 2U);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(gradients[i].x, weights[i].right());
    EXPECT_NEAR(gradients[i].width, 2 * weights[i].width, 2);
  }
  EXPECT_NEAR(weights[0].width, 2 * weights[1].width, 2);
  EXPECT_LT(weights[0].bottom(), weights[1].y);
  bool line = false;
  for (const auto& path : picture.paths) {
    if (path.dash != "6 3") continue;
    line = true;
    EXPECT_NEAR(testing::numbers_of(path.d)[0] - weights[0].x, 4 * weights[0].width, 4);
  }
  EXPECT_TRUE(line);
  EXPECT_EQ(picture.titles, (std::vector<std::string>{
                                "a title", "shard 0, keeps all: weights 4.0 GB", "shard 0, keeps all: gradients 8.0 GB",
                                "shard 1, keeps all: weights 2.0 GB", "shard 1, keeps all: gradients 4.0 GB"}));
  EXPECT_EQ(picture.description, "a description");
  EXPECT_EQ(picture.count("a device"), 1);
}

TEST(StackedBars, WhatDoesNotFitIsPaleAndFarBarsAreCut) {
  const ParsedSvg picture = sound(bars_of(
      {{"shard 0", "keeps all", {4e12, 8e12}, "12.0 TB", false}, {"shard 3", "keeps all", {4e9, 8e9}, "12.0 GB"}},
      16e9));
  EXPECT_EQ(parts(picture, kHues[0].tint).size(), 1U);
  EXPECT_GT(parts(picture, kHues[0].line).at(0).width, 20) << "beside a far bar";
  EXPECT_EQ(picture.count("A slanted end: the bar is longer."), 1);
  EXPECT_EQ(picture.count("Faint: more than there is."), 1);
}

TEST(StackedBars, AnyAmountsGiveASoundPicture) {
  EXPECT_TRUE(parts(sound(bars_of({}, 0)), kHues[0].line).empty());
  for (const double limit : {0.0, 1.0, 1e3, 8e10, 1e18}) {
    for (const double amount : {0.0, 1.0, 12345.0, 3e9, 8e10, 1e15}) {
      std::vector<StackedBar> bars;
      for (int level = 0; level < 4; ++level) {
        for (const char* keeps : {"all", "recompute", "offload", "optimizer"}) {
          bars.push_back({"shard " + std::to_string(level),
                          std::string("keeps ") + keeps,
                          {amount, amount / (level + 1)},
                          bytes_text(amount) + "; rows to at least 134,217,728",
                          amount < limit});
        }
      }
      sound(bars_of(bars, limit));
      if (::testing::Test::HasFailure()) FAIL() << limit << " " << amount;
    }
  }
}

TEST(StackedBars, PartsMustBeThoseOfTheLegend) {
  expect_error(ErrorKind::kInternal, {"1 part", "2 kinds"}, [] { stacked_bars_svg(bars_of({{"", "a", {1}, ""}}, 1)); });
}

}  // namespace
}  // namespace annulus::stacked_bars_test
