// See stacked_bars.h.
#include "common/svg/stacked_bars.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <string_view>

#include "common/error.h"
#include "common/svg/canvas.h"
#include "common/svg/legend.h"
#include "common/svg/palette.h"
#include "common/svg/ticks.h"
#include "common/text.h"

namespace annulus {
namespace {

constexpr int kPage = 900, kEdge = 24, kNote = 250, kFontOfBars = 12, kFontInside = 10;
constexpr int kBar = 20, kBetweenBars = 4, kBetweenGroups = 12;
// A bar may be this many times as long as the limit.
constexpr double kLongest = 2.5;

double sum(const std::vector<double>& parts) { return std::accumulate(parts.begin(), parts.end(), 0.0); }

class BarsDrawing {
 public:
  explicit BarsDrawing(const StackedBars& bars) : bars_(bars) {
    double most = 0;
    int groups = 0, names = 0;
    for (const StackedBar& bar : bars.bars) {
      if (bar.parts.size() != bars.kinds.size() || bars.kinds.size() >= kHues.size()) {
        throw Error(ErrorKind::kInternal, "svg",
                    "a bar of " + counted(static_cast<int64_t>(bar.parts.size()), "part") + " and a legend of " +
                        counted(static_cast<int64_t>(bars.kinds.size()), "kind"));
      }
      most = std::max(most, sum(bar.parts));
      groups = std::max(groups, text_width(bar.group, kFontOfBars));
      names = std::max(names, text_width(bar.name, kFontOfBars));
    }
    end_ = std::max(most, bars.limit) * 1.04;
    if (bars.limit > 0) end_ = std::min(end_, bars.limit * kLongest);
    if (end_ <= 0) end_ = 1;
    name_x_ = kEdge + groups + (groups > 0 ? 14 : 0);
    plot_.x = name_x_ + names + 10;
    plot_.width = kPage - kEdge - kNote - plot_.x;
  }

  std::string draw() {
    canvas_.text({kEdge, 34}, bars_.title, 18, kPage - 2 * kEdge, kInk, /*bold=*/true);
    plot_.y = canvas_.paragraph({kEdge, 56}, bars_.subtitle, kFontOfBars, kPage - 2 * kEdge, kFaint) + 26;
    place();
    draw_axis();
    std::string group;
    for (size_t i = 0; i < bars_.bars.size(); ++i) draw_bar(i);
    draw_limit();
    Legend legend(canvas_, {kEdge, plot_.bottom() + 52}, kPage - 2 * kEdge);
    for (size_t k = 0; k < bars_.kinds.size(); ++k) legend.swatch(bars_.kinds[k], kHues[k].line);
    const auto beyond = [](const StackedBar& bar) { return !bar.within; };
    if (std::any_of(bars_.bars.begin(), bars_.bars.end(), beyond)) legend.words("Faint: more than there is.");
    const auto cut = [&](const StackedBar& bar) { return sum(bar.parts) > end_; };
    if (std::any_of(bars_.bars.begin(), bars_.bars.end(), cut)) legend.words("A slanted end: the bar is longer.");
    canvas_.describe(bars_.title, bars_.description);
    return canvas_.print(kPage, legend.bottom() + kEdge);
  }

 private:
  int x(double amount) const {
    return plot_.x + static_cast<int>(std::lround(std::min(amount, end_) / end_ * plot_.width));
  }

  void place() {
    int y = plot_.y + 8;
    for (size_t i = 0; i < bars_.bars.size(); ++i) {
      if (i > 0) y += bars_.bars[i].group == bars_.bars[i - 1].group ? kBetweenBars : kBetweenGroups;
      tops_.push_back(y);
      y += kBar;
    }
    plot_.height = y + 8 - plot_.y;
  }

  void draw_axis() {
    const double step = round_distance(end_ / 5);
    for (int i = 0; i * step <= end_; ++i) {
      const int at = x(i * step);
      canvas_.line(straight({at, plot_.y}, {at, plot_.bottom()}), "#d5dae0", 1, "", /*arrow=*/false);
      canvas_.text({at, plot_.bottom() + 17}, i == 0 ? "0" : bars_.text(i * step), kFontOfBars - 1, kNote, kFaint,
                   /*bold=*/false, SvgCanvas::Anchor::kMiddle);
    }
  }

  void draw_bar(size_t i) {
    const StackedBar& bar = bars_.bars[i];
    const int y = tops_[i], base = y + 14;
    if (i == 0 || bars_.bars[i - 1].group != bar.group) {
      canvas_.text({kEdge, base}, bar.group, kFontOfBars, plot_.x, kInk, /*bold=*/true);
    }
    canvas_.text({name_x_, base}, bar.name, kFontOfBars, plot_.x, kInk);
    double from = 0;
    for (size_t k = 0; k < bar.parts.size(); ++k) {
      const double until = from + bar.parts[k];
      const int left = x(from), width = x(until) - left;
      from = until;
      if (width <= 0) continue;
      const std::string amount = bars_.text(bar.parts[k]);
      canvas_.open((bar.group.empty() ? "" : bar.group + ", ") + bar.name + ": " + bars_.kinds[k] + " " + amount);
      const std::string_view fill = bar.within ? kHues[k].line : kHues[k].tint;
      canvas_.box({left, y, width, kBar}, 0, fill, bar.within ? "#ffffff" : kHues[k].line);
      if (text_width(amount, kFontInside) + 6 <= width) {
        canvas_.text({left + width / 2, base}, amount, kFontInside, width, text_color_on(fill), /*bold=*/false,
                     SvgCanvas::Anchor::kMiddle);
      }
      canvas_.close();
    }
    int end = x(from);
    if (from > end_) {  // white over the end, which leaves it slanted
      const std::string right = std::to_string(end + 1);
      canvas_.area("M" + right + " " + std::to_string(y - 1) + "V" + std::to_string(y + kBar + 1) + "H" +
                       std::to_string(end - 9) + "Z",
                   "#ffffff", "none");
    }
    // The note never lies on the line of the limit.
    const int line = bars_.limit > 0 ? x(bars_.limit) : 0;
    if (line > end - 4 && line < end + 8 + text_width(bar.note, kFontOfBars)) end = line;
    canvas_.text({end + 8, base}, bar.note, kFontOfBars, kPage - kEdge / 2 - end - 8, kInk);
  }

  void draw_limit() {
    if (bars_.limit <= 0) return;
    const int at = x(bars_.limit);
    canvas_.line(straight({at, plot_.y - 4}, {at, plot_.bottom()}), kInk, 2, "6 3", /*arrow=*/false);
    // To the left of the line, as notes are to its right, unless there is no room.
    const bool left = at - kEdge > text_width(bars_.limit_name, kFontOfBars);
    canvas_.text({at, plot_.y - 9}, bars_.limit_name, kFontOfBars, kPage, kInk, /*bold=*/true,
                 left ? SvgCanvas::Anchor::kEnd : SvgCanvas::Anchor::kStart);
  }

  const StackedBars& bars_;
  SvgCanvas canvas_;
  std::vector<int> tops_;
  Box plot_;
  int name_x_ = 0;
  double end_ = 1;
};

}  // namespace

std::string stacked_bars_svg(const StackedBars& bars) { return BarsDrawing(bars).draw(); }

}  // namespace annulus
