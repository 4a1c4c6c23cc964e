// Tests of common/svg/heat_map.h: cells are at their places with their numbers, darker where the share is larger, and
// readable.
#include "common/svg/heat_map.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "common/error.h"
#include "tests/common/expect_error.h"
#include "tests/common/svg/parsed_svg.h"

namespace annulus::heat_map_test {
namespace {

using testing::parse_svg;
using testing::ParsedBox;
using testing::ParsedSvg;
using testing::ParsedWord;

constexpr size_t kScale = 11;  // boxes of the scale, which come last

ParsedSvg sound(const HeatMap& map) {
  const std::string svg = heat_map_svg(map);
  EXPECT_EQ(testing::xml_fault(svg), "");
  ParsedSvg picture = parse_svg(svg);
  EXPECT_EQ(testing::layout_fault(picture), "");
  return picture;
}

HeatMap map_of(std::vector<std::string> columns, std::vector<std::string> rows) {
  HeatMap map{"a title", "a subtitle",       "length (tokens)", "depth (%)",
              "exact",   std::move(columns), std::move(rows),   {}};
  map.shares.assign(map.rows.size(), std::vector<std::optional<double>>(map.columns.size(), 0.5));
  return map;
}

double luminance(const std::string& color) {
  const auto linear = [&](size_t at) {
    const double c = std::stoi(color.substr(at, 2), nullptr, 16) / 255.0;
    return c <= 0.04045 ? c / 12.92 : std::pow((c + 0.055) / 1.055, 2.4);
  };
  return 0.2126 * linear(1) + 0.7152 * linear(3) + 0.0722 * linear(5);
}

TEST(HeatMap, CellsHaveTheirNumbersAndPlaces) {
  HeatMap map = map_of({"1K", "2K", "4K"}, {"0", "100"});
  map.shares = {{1.0, 0.9, 0.15}, {0.25, std::nullopt, 0.35}};
  const ParsedSvg picture = sound(map);
  ASSERT_EQ(picture.boxes.size(), 6U + kScale);
  const std::vector<std::string> texts = {"100", "90", "15", "25", "-", "35"};
  for (size_t i = 0; i < 6; ++i) {
    const ParsedBox& cell = picture.boxes[i];
    const auto in_it = std::count_if(picture.words.begin(), picture.words.end(), [&](const ParsedWord& word) {
      return testing::within(word.box, cell) && word.text == texts[i];
    });
    EXPECT_EQ(in_it, 1) << i;
    EXPECT_EQ(cell.y, picture.boxes[i / 3 * 3].y);
    EXPECT_EQ(cell.x, picture.boxes[i % 3].x);
  }
  EXPECT_LT(picture.boxes[0].right(), picture.boxes[1].x);
  EXPECT_LT(picture.boxes[0].bottom(), picture.boxes[3].y);
  EXPECT_EQ(picture.boxes[4].fill, "#ffffff");
  for (const char* text : {"a title", "a subtitle", "length (tokens)", "depth (%)", "exact (%)", "1K", "2K", "4K"}) {
    EXPECT_EQ(picture.count(text), 1) << text;
  }
}

TEST(HeatMap, PercentHasADigitIfACellNeedsOne) {
  HeatMap map = map_of({"1K", "2K"}, {"0"});
  map.shares = {{1.0, 63.0 / 64}};
  EXPECT_EQ(sound(map).count("100.0"), 1);
  EXPECT_EQ(sound(map).count("98.4"), 1);
  map.shares = {{0.29, 0.57}};  // times 100 they are not quite whole
  EXPECT_EQ(sound(map).count("29"), 1);
  EXPECT_EQ(sound(map).count("57"), 1);
}

TEST(HeatMap, LargerSharesAreDarkerAndNumbersReadable) {
  HeatMap map = map_of({}, {"0"});
  for (int i = 0; i <= 100; ++i) map.columns.push_back(std::to_string(i));
  map.shares.assign(1, {});
  for (int i = 0; i <= 100; ++i) map.shares[0].emplace_back(i / 100.0);
  const ParsedSvg picture = sound(map);
  for (size_t i = 0; i <= 100; ++i) {
    const ParsedBox& cell = picture.boxes[i];
    const double light = luminance(cell.fill);
    if (i > 0) {
      EXPECT_LT(light, luminance(picture.boxes[i - 1].fill)) << i;
    }
    for (const ParsedWord& word : picture.words) {
      if (!testing::within(word.box, cell)) continue;
      const double text = luminance(word.color);
      // WCAG's contrast for texts of any size.
      EXPECT_GE((std::max(light, text) + 0.05) / (std::min(light, text) + 0.05), 4.5) << i;
    }
  }
  EXPECT_EQ(picture.boxes[101].fill, picture.boxes[100].fill) << "the scale's upper end";
  EXPECT_EQ(picture.boxes.back().fill, picture.boxes[0].fill);
}

TEST(HeatMap, AnyShapeGivesASoundPicture) {
  EXPECT_EQ(sound(map_of({}, {})).count("no data"), 1);
  for (const size_t columns : {1, 2, 7, 40}) {
    for (const size_t rows : {1, 2, 5, 30}) {
      HeatMap map = map_of(std::vector<std::string>(columns, "1,000,000"), std::vector<std::string>(rows, "33.3"));
      EXPECT_EQ(sound(map).boxes.size(), columns * rows + kScale);
      map.shares[0][0] = 1.0 / 3;
      EXPECT_EQ(sound(map).count("50.0"), static_cast<int64_t>(columns * rows) - 1);
    }
  }
  EXPECT_EQ(sound(map_of({"1K"}, {""})).count("depth (%)"), 0) << "rows without names need no label";
}

TEST(HeatMap, LongNamesAreCutAndEscaped) {
  HeatMap map = map_of({"<&>"}, {"<&>"});
  map.title = map.subtitle = map.x_label = map.y_label = map.scale_label = "<&>" + std::string(1000, 'm');
  EXPECT_EQ(sound(map).count("<&>"), 2);
}

TEST(HeatMap, SharesMustFitTheGrid) {
  const auto refused = [](const HeatMap& map) {
    expect_error(ErrorKind::kInternal, {"1 row", "2 columns"}, [&] { heat_map_svg(map); });
  };
  HeatMap map = map_of({"1K", "2K"}, {"0"});
  for (const double share : {-0.01, 1.01, std::numeric_limits<double>::quiet_NaN()}) {
    map.shares[0][1] = share;
    refused(map);
  }
  map.shares[0].pop_back();
  refused(map);
  map.shares.clear();
  refused(map);
}

}  // namespace
}  // namespace annulus::heat_map_test
