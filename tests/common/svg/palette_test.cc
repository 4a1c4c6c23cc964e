// Tests of common/svg/palette.h: scales run from end to end and get lighter, or darker, all the way; text is readable.
#include "common/svg/palette.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <set>
#include <string>

namespace annulus::palette_test {
namespace {

// The relative luminance of WCAG 2.2.
double luminance(std::string_view color) {
  double sum = 0;
  const double weights[] = {0.2126, 0.7152, 0.0722};
  for (size_t i = 0; i < 3; ++i) {
    const double c = static_cast<double>(std::stoi(std::string(color.substr(1 + 2 * i, 2)), nullptr, 16)) / 255;
    sum += weights[i] * (c <= 0.04045 ? c / 12.92 : std::pow((c + 0.055) / 1.055, 2.4));
  }
  return sum;
}

double contrast(std::string_view a, std::string_view b) {
  const double first = luminance(a) + 0.05, second = luminance(b) + 0.05;
  return std::max(first, second) / std::min(first, second);
}

TEST(Palette, LightnessOfScalesGrowsSteadily) {
  for (const ColorScale scale : {ColorScale::kViridis, ColorScale::kPlasma}) {
    double before = -1;
    for (int i = 0; i <= 40; ++i) {
      const double light = luminance(scale_color(scale, i / 40.0));
      EXPECT_GT(light, before) << i;
      before = light;
    }
    EXPECT_EQ(scale_color(scale, -1), scale_color(scale, 0));
    EXPECT_EQ(scale_color(scale, 2), scale_color(scale, 1));
  }
  EXPECT_GT(luminance(scale_color(ColorScale::kBlues, 0)), luminance(scale_color(ColorScale::kBlues, 1)));
}

TEST(Palette, TextOnAnyColourHasTheContrastOfWcag) {
  for (const ColorScale scale : {ColorScale::kBlues, ColorScale::kViridis, ColorScale::kPlasma}) {
    for (int i = 0; i <= 40; ++i) {
      const std::string color = scale_color(scale, i / 40.0);
      EXPECT_GE(contrast(color, text_color_on(color)), 4.5) << color;
    }
  }
  std::set<std::string_view> lines;
  for (const Hue& hue : kHues) {
    lines.insert(hue.line);
    EXPECT_GE(contrast(hue.line, text_color_on(hue.line)), 4.5) << hue.line;
    EXPECT_GT(luminance(hue.tint), luminance(hue.line));
  }
  EXPECT_EQ(lines.size(), kHues.size());
}

}  // namespace
}  // namespace annulus::palette_test
