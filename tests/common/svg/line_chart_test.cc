// Tests of common/svg/line_chart.h: every point is at its place between ticks, lines differ without colours, texts do
// not overlap, and any data give a sound picture.
#include "common/svg/line_chart.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/common/svg/parsed_svg.h"

namespace annulus::line_chart_test {
namespace {

using testing::numbers_of;
using testing::parse_svg;
using testing::ParsedPath;
using testing::ParsedSvg;
using testing::ParsedWord;

ParsedSvg sound(const LineChart& chart) {
  const std::string svg = line_chart_svg(chart);
  EXPECT_EQ(testing::xml_fault(svg), "");
  ParsedSvg picture = parse_svg(svg);
  EXPECT_EQ(testing::layout_fault(picture), "");
  return picture;
}

LineChart chart_of(std::vector<ChartLine> lines) {
  return {"a title", "a subtitle", "position (tokens)", "perplexity", std::move(lines), {}};
}

// Paths that are filled and not bands, which have no stroke: markers, those of the legend included.
std::vector<ParsedPath> markers(const ParsedSvg& picture) {
  std::vector<ParsedPath> out;
  for (const ParsedPath& path : picture.paths) {
    if (path.fill != "none" && path.color != "none") out.push_back(path);
  }
  return out;
}

std::vector<ParsedPath> bands(const ParsedSvg& picture) {
  std::vector<ParsedPath> out;
  for (const ParsedPath& path : picture.paths) {
    if (path.color == "none") out.push_back(path);
  }
  return out;
}

// The lines through more than two points.
std::vector<ParsedPath> polylines(const ParsedSvg& picture) {
  std::vector<ParsedPath> out;
  for (const ParsedPath& path : picture.paths) {
    if (path.fill == "none" && numbers_of(path.d).size() > 4 && path.d.find('H') == std::string::npos)
      out.push_back(path);
  }
  return out;
}

int middle(const ParsedSvg& picture, const std::string& text) {
  for (const ParsedWord& word : picture.words) {
    if (word.text == text) return word.box.x + word.box.width / 2;
  }
  ADD_FAILURE() << "no text " << text;
  return 0;
}

// The level of a tick of y, whose text's baseline is 4 pixels lower.
int level(const ParsedSvg& picture, const std::string& text) {
  for (const ParsedWord& word : picture.words) {
    if (word.text == text) return word.box.y + 11 * 3 / 4 - 4;
  }
  ADD_FAILURE() << "no text " << text;
  return 0;
}

TEST(LineChart, PointsLieAtTheirTicks) {
  const ParsedSvg picture = sound(chart_of({{"books", {{1, 2}, {2, 3}, {4, 4}, {8, 3}, {1024, 2}}}}));
  const auto lines = polylines(picture);
  ASSERT_EQ(lines.size(), 1U);
  const auto at = numbers_of(lines[0].d);
  ASSERT_EQ(at.size(), 10U);
  EXPECT_NEAR(at[4], middle(picture, "4"), 1);
  EXPECT_NEAR(at[8], middle(picture, "1K"), 1);
  EXPECT_NEAR(at[1], level(picture, "2.0"), 1);
  EXPECT_NEAR(at[3], level(picture, "3.0"), 1);
  EXPECT_NEAR(at[5], level(picture, "4.0"), 1);
  EXPECT_NEAR(at[2] - at[0], at[4] - at[2], 0.2) << "x is logarithmic";
  EXPECT_NEAR((at[8] - at[0]) / (at[2] - at[0]), 10, 0.1);
  EXPECT_EQ(markers(picture).size(), 5U + 1) << "and one in the legend";
  for (const char* text : {"a title", "a subtitle", "position (tokens)", "perplexity", "books"}) {
    EXPECT_EQ(picture.count(text), 1) << text;
  }
}

TEST(LineChart, FarValuesAreLogarithmic) {
  const ParsedSvg picture = sound(chart_of({{"books", {{1, 10}, {2, 100}, {4, 1000}, {8, 10000}}}}));
  const auto at = numbers_of(polylines(picture).at(0).d);
  EXPECT_EQ(picture.count("perplexity (log scale)"), 1);
  EXPECT_NEAR(at[1] - at[3], at[3] - at[5], 0.2);
  EXPECT_NEAR(at[5], level(picture, "1,000"), 1);
}

TEST(LineChart, LinesDifferWithoutColours) {
  std::vector<ChartLine> lines;
  for (int i = 0; i < 10; ++i) {
    lines.push_back({"line " + std::to_string(i), {{1, 1.0 + i}, {2, 2.0 + i}, {4, 1.5 + i}}});
  }
  const ParsedSvg picture = sound(chart_of(lines));
  ASSERT_EQ(polylines(picture).size(), 10U);
  std::set<std::pair<std::string, std::string>> looks;
  const auto all = markers(picture);
  ASSERT_EQ(all.size(), 40U);
  for (size_t i = 0; i < 10; ++i) {
    std::string shape;  // the marker from its first corner on, and whether it is filled
    const auto corners = numbers_of(all[3 * i].d);
    for (size_t c = 2; c < corners.size(); ++c) shape += std::to_string(std::lround(corners[c] - corners[c % 2])) + " ";
    shape += all[3 * i].fill == "#ffffff" ? "open" : "filled";
    looks.insert({polylines(picture)[i].dash, shape});
    EXPECT_EQ(picture.count("line " + std::to_string(i)), 1);
  }
  EXPECT_EQ(looks.size(), 10U);
}

TEST(LineChart, BandsHoldTheirPoints) {
  const ParsedSvg picture = sound(chart_of({{"books", {{1, 5, 4.0, 6.0}, {2, 4, 3.5, 4.5}, {4, 3, 2.9, 3.1}}}}));
  ASSERT_EQ(bands(picture).size(), 1U);
  const auto band = numbers_of(bands(picture)[0].d), at = numbers_of(polylines(picture)[0].d);
  ASSERT_EQ(band.size(), 12U);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(band[2 * i], at[2 * i]);
    EXPECT_EQ(band[2 * (5 - i)], at[2 * i]);
    EXPECT_LT(band[2 * i + 1], at[2 * i + 1]) << "the upper end";
    EXPECT_GT(band[2 * (5 - i) + 1], at[2 * i + 1]);
  }
}

TEST(LineChart, PointsThatAreNoNumbersInterruptLines) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN(), kInfinite = std::numeric_limits<double>::infinity();
  const ParsedSvg picture = sound(chart_of(
      {{"books",
        {{1, 5}, {2, 4}, {4, 3}, {8, kNan}, {16, kInfinite}, {0.5, 1}, {32, 3}, {64, 4}, {128, 1e305}, {1e19, 4}}}}));
  EXPECT_EQ(markers(picture).size(), 5U + 1);
  ASSERT_EQ(polylines(picture).size(), 1U) << "the second piece has two points";
  EXPECT_EQ(numbers_of(polylines(picture)[0].d).size(), 6U);
}

TEST(LineChart, MarksStandAtTheirPosition) {
  LineChart chart = chart_of({{"books", {{1, 5}, {2, 4}, {1024, 3}, {8192, 6}}}});
  chart.marks = {{1024, "trained"}, {8192, "trained"}, {1 << 20, "outside"}};
  const ParsedSvg picture = sound(chart);
  std::vector<double> at;
  for (const ParsedPath& path : picture.paths) {
    if (path.dash == "4 3" && path.d.find('V') != std::string::npos) at.push_back(numbers_of(path.d)[0]);
  }
  const auto points = numbers_of(polylines(picture).at(0).d);
  EXPECT_EQ(at, (std::vector<double>{points[4], points[6]}));
  EXPECT_EQ(picture.count("trained"), 1);
  EXPECT_EQ(picture.count("outside"), 0);
}

TEST(LineChart, AnyDataGiveASoundPicture) {
  EXPECT_EQ(sound({}).count("no data"), 1);
  EXPECT_EQ(sound(chart_of({{"books", {}}})).count("no data"), 1);
  EXPECT_EQ(markers(sound(chart_of({{"books", {{1, 1}}}}))).size(), 2U);
  for (const double x : {1.0, 3.0, 1024.0, 1e6, 1e9}) {
    for (const double x_span : {1.0, 2.0, 1000.0, 1e9}) {
      for (const double y : {-1e299, -2.5, -1e-300, 0.0, 1e-299, 1e-7, 1.0, 3.14159, 99.99, 123456.0, 1e15, 1e299}) {
        for (const double y_span : {1.0, 1.0 + 1e-15, 1.0001, 1.3, 4.9, 5.1, 30.0, 12345.0, 1e12}) {
          if (std::abs(y) > 1e290 && y_span > 1.4) continue;
          const ParsedSvg picture = sound(chart_of({{"books", {{x, y}, {x * x_span, y * y_span}}}}));
          EXPECT_EQ(markers(picture).size(), 3U);
          if (::testing::Test::HasFailure()) FAIL() << x << " " << x_span << " " << y << " " << y_span;
        }
      }
    }
  }
}

TEST(LineChart, LongNamesAreCutAndEscaped) {
  LineChart chart = chart_of({{"<b> & \"books\"", {{1, 5}, {2, 4}}}, {std::string(1000, 'W'), {{1, 4}, {2, 3}}}});
  chart.title = chart.subtitle = chart.x_label = chart.y_label = "<&>" + std::string(1000, 'm');
  const std::string svg = line_chart_svg(chart);
  EXPECT_NE(svg.find("&lt;b&gt; &amp; &quot;books&quot;"), std::string::npos);
  EXPECT_EQ(sound(chart).count("<b> & \"books\""), 1);
}

}  // namespace
}  // namespace annulus::line_chart_test
