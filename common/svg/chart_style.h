// What the charts of this package have in common: sizes, and the head with title and subtitle. Internal to common/svg.
#pragma once

#include <string>

#include "common/svg/canvas.h"

namespace annulus {

// Sizes in pixels. A chart is 400 wide where its content allows, so that in a column of a paper, 3.3 inches wide, its
// letters are as high as those of a caption (7 points).
inline constexpr int kChartWidth = 400;
inline constexpr int kChartFont = 12;
inline constexpr int kChartMargin = 12;
inline constexpr std::string_view kChartFrame = "#57606a";
inline constexpr std::string_view kChartGrid = "#d5dae0";

// Draws title and subtitle (which may be empty) and returns the y coordinate below them.
inline int draw_chart_head(SvgCanvas& canvas, const std::string& title, const std::string& subtitle, int width) {
  const int room = width - 2 * kChartMargin;
  canvas.text({kChartMargin, 20}, title, 14, room, kInk, /*bold=*/true);
  canvas.text({kChartMargin, 37}, subtitle, kChartFont - 1, room, kFaint);
  return subtitle.empty() ? 32 : 49;
}

}  // namespace annulus
