// See line_chart.h.
#include "common/svg/line_chart.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string_view>

#include "common/svg/canvas.h"
#include "common/svg/chart_style.h"
#include "common/svg/legend.h"
#include "common/svg/ticks.h"
#include "common/text.h"

namespace annulus {
namespace {

constexpr int kPlotHeight = 200;
constexpr int kSample = 30;
constexpr int kMostTicks = 7;
constexpr double kLogarithmicFrom = 5;
constexpr double kFarthest = 0x1p60, kLargest = 1e300;  // of x and y

// Colours whose lightness differs little, so that none fades when printed in grey; dashes and markers tell the lines
// apart then.
constexpr std::array<std::string_view, 6> kColors = {"#2b6cb0", "#c05621", "#2f855a", "#b7791f", "#805ad5", "#57606a"};
constexpr std::array<std::string_view, 4> kDashes = {"", "7 3", "2 3", "9 3 2 3"};
constexpr size_t kMarkers = 5;

std::string at(double x, double y) { return rounded(x, 1) + " " + rounded(y, 1); }

// The path of the i-th line's marker, around a point.
std::string marker(size_t i, double x, double y) {
  constexpr double r = 3.2;
  const auto polygon = [&](std::initializer_list<std::pair<double, double>> corners) {
    std::string path;
    for (const auto& [dx, dy] : corners) path += (path.empty() ? "M" : "L") + at(x + r * dx, y + r * dy);
    return path + "Z";
  };
  switch (i % kMarkers) {
    case 0: {
      const std::string radius = rounded(r, 1) + " " + rounded(r, 1) + " 0 1 0 ";
      return "M" + at(x - r, y) + "A" + radius + at(x + r, y) + "A" + radius + at(x - r, y) + "Z";
    }
    case 1:
      return polygon({{-0.9, -0.9}, {0.9, -0.9}, {0.9, 0.9}, {-0.9, 0.9}});
    case 2:
      return polygon({{0, -1.2}, {1.15, 0.8}, {-1.15, 0.8}});
    case 3:
      return polygon({{0, -1.35}, {1.35, 0}, {0, 1.35}, {-1.35, 0}});
    default:
      return polygon({{0, 1.2}, {1.15, -0.8}, {-1.15, -0.8}});
  }
}

struct Tick {
  double value = 0;
  std::string text;
};

// An axis from its first tick to its last.
struct Axis {
  std::vector<Tick> ticks;
  double low = 0, high = 1;  // of scaled values
  bool logarithmic = false;

  double scaled(double value) const { return logarithmic ? std::log2(value) : value; }
  // Where a value lies between the ends: 0 to 1.
  double share(double value) const { return (scaled(value) - low) / (high - low); }
  bool holds(double value) const {
    return (!logarithmic || value > 0) && scaled(value) >= low && scaled(value) <= high;
  }
  int widest() const {
    int width = 0;
    for (const Tick& tick : ticks) width = std::max(width, text_width(tick.text, kChartFont - 1));
    return width;
  }
};

std::string power_text(int exponent) {
  constexpr std::array<const char*, 7> kUnits = {"", "K", "M", "G", "T", "P", "E"};
  return std::to_string(1 << exponent % 10) + kUnits[static_cast<size_t>(exponent / 10)];
}

std::string value_text(double value, int digits) {
  if (std::abs(value) >= 1e7) {  // "1e12", without the sign of the exponent
    std::string text = significant(value, 6);
    if (const size_t plus = text.find("e+"); plus != std::string::npos) text.erase(plus + 1, 1);
    return text;
  }
  if (digits > 6) return significant(value, 9);
  return digits <= 0 ? with_commas(std::llround(value)) : rounded(value, digits);
}

// The axis of powers of two around the values; `room` pixels decide how many of them get a text.
Axis axis_of_powers(double least, double most, int room) {
  Axis axis;
  axis.logarithmic = true;
  int first = static_cast<int>(std::floor(std::log2(least))), last = static_cast<int>(std::ceil(std::log2(most)));
  if (first == last) {
    first = std::max(0, first - 1);
    ++last;
  }
  axis.low = first;
  axis.high = last;
  for (int e = first; e <= last; ++e) axis.ticks.push_back({std::exp2(e), power_text(e)});
  int every = 1;
  while (room * every < (axis.widest() + 8) * (last - first) && every < last - first) ++every;
  for (size_t i = 0; i < axis.ticks.size(); ++i) {
    // The last power has a text; it is the one that matters.
    if ((last - first - static_cast<int>(i)) % every != 0) axis.ticks[i].text.clear();
  }
  return axis;
}

Axis linear_axis(double least, double most) {
  const double size = std::max(std::abs(least), std::abs(most));
  if (most - least <= 1e-9 * size || size == 0) {  // one value, but for rounding
    const double around = size == 0 ? 1 : 0.1 * size;
    least -= around;
    most += around;
  }
  const double step = round_distance((most - least) / (kMostTicks - 2));
  const int digits = std::max(0, -static_cast<int>(std::floor(std::log10(step) + 1e-9)));
  const double first = std::floor(least / step + 1e-9), last = std::ceil(most / step - 1e-9);
  Axis axis;
  axis.low = first * step;
  axis.high = last * step;
  for (double i = first; i <= last; ++i) axis.ticks.push_back({i * step, value_text(i * step, digits)});
  return axis;
}

// The axis over 1, 2, 5, 10, ..., or over powers of ten if those are too many.
Axis logarithmic_axis(double least, double most) {
  constexpr double kInside = 1e-9;  // a value at a tick, but for rounding
  const double low = std::log10(least) + kInside, high = std::log10(most) - kInside;
  const auto log_of = [](int i) {  // the i-th of 1, 2, 5, 10, ...
    constexpr std::array<double, 3> kLogs = {0, 0.30102999566398120, 0.69897000433601880};
    const int decade = static_cast<int>(std::floor(i / 3.0));
    return decade + kLogs[static_cast<size_t>(i - 3 * decade)];
  };
  int first = 3 * static_cast<int>(std::floor(low)), last = 3 * static_cast<int>(std::ceil(high)), every = 1;
  while (log_of(first + 1) <= low) ++first;
  while (log_of(last - 1) >= high) --last;
  if (last - first >= kMostTicks) {
    first = static_cast<int>(std::floor(low));
    last = static_cast<int>(std::ceil(high));
    every = (last - first + kMostTicks - 2) / (kMostTicks - 1);
    last = first + (last - first + every - 1) / every * every;
    first *= 3;
    last *= 3;
    every *= 3;
  }
  Axis axis;
  axis.logarithmic = true;
  for (int i = first; i <= last; i += every) {
    const double log = log_of(i);
    const double value = std::pow(10, log);
    axis.ticks.push_back({value, value_text(value, std::max(0, -static_cast<int>(std::floor(log + kInside))))});
  }
  axis.low = std::log2(axis.ticks.front().value);
  axis.high = std::log2(axis.ticks.back().value);
  return axis;
}

// Whether the axes' arithmetic can place it.
bool placeable(double value) { return std::abs(value) <= kLargest; }

bool drawn(const ChartPoint& point) { return point.x >= 1 && point.x <= kFarthest && placeable(point.y); }

bool banded(const ChartPoint& point) {
  return point.low && point.high && placeable(*point.low) && placeable(*point.high);
}

class Drawing {
 public:
  explicit Drawing(const LineChart& chart) : chart_(chart) {
    for (const ChartLine& line : chart.lines) {
      for (const ChartPoint& point : line.points) {
        if (!drawn(point)) continue;
        x_.take(point.x);
        y_.take(point.y);
        if (banded(point)) {
          y_.take(*point.low);
          y_.take(*point.high);
        }
      }
    }
  }

  std::string draw() {
    plot_.y = draw_chart_head(canvas_, chart_.title, chart_.subtitle, kChartWidth);
    plot_.height = kPlotHeight;
    if (x_.empty()) {
      set_sides(0);
      canvas_.text({plot_.x + plot_.width / 2, plot_.y + kPlotHeight / 2}, "no data", kChartFont, plot_.width, kFaint,
                   /*bold=*/false, SvgCanvas::Anchor::kMiddle);
      draw_frame();
      return canvas_.print(kChartWidth, draw_legend());
    }
    const bool far_apart = y_.least >= 1 / kLargest && y_.most > kLogarithmicFrom * y_.least;
    y_axis_ = far_apart ? logarithmic_axis(y_.least, y_.most) : linear_axis(y_.least, y_.most);
    set_sides(y_axis_.widest());
    x_axis_ = axis_of_powers(x_.least, x_.most, plot_.width);
    draw_ticks();
    draw_marks();
    draw_bands();
    draw_frame();
    for (size_t i = 0; i < chart_.lines.size(); ++i) draw_line(i);
    return canvas_.print(kChartWidth, draw_legend());
  }

 private:
  struct Range {
    double least = std::numeric_limits<double>::infinity(), most = -least;
    void take(double value) {
      least = std::min(least, value);
      most = std::max(most, value);
    }
    bool empty() const { return least > most; }
  };

  // `texts` is the width of those at the ticks of y.
  void set_sides(int texts) {
    plot_.x = kChartMargin + kChartFont + 8 + texts + 8;
    plot_.width = kChartWidth - plot_.x - kChartMargin - 6;
  }

  double x(double value) const { return plot_.x + plot_.width * x_axis_.share(value); }
  double y(double value) const { return plot_.bottom() - plot_.height * y_axis_.share(value); }

  void draw_ticks() {
    for (const Tick& tick : y_axis_.ticks) {
      const int level = static_cast<int>(std::lround(y(tick.value)));
      canvas_.line("M" + at(plot_.x, level) + "H" + std::to_string(plot_.right()), kChartGrid, 1, "", /*arrow=*/false);
      canvas_.text({plot_.x - 6, level + 4}, tick.text, kChartFont - 1, plot_.x, kInk, /*bold=*/false,
                   SvgCanvas::Anchor::kEnd);
    }
    for (const Tick& tick : x_axis_.ticks) {
      const int middle = static_cast<int>(std::lround(x(tick.value)));
      const int length = tick.text.empty() ? 3 : 5;
      canvas_.line(straight({middle, plot_.bottom()}, {middle, plot_.bottom() + length}), kChartFrame, 1, "",
                   /*arrow=*/false);
      if (tick.text.empty()) continue;
      canvas_.text({middle, plot_.bottom() + 18}, tick.text, kChartFont - 1, kChartWidth, kInk, /*bold=*/false,
                   SvgCanvas::Anchor::kMiddle);
    }
  }

  void draw_marks() {
    for (const ChartMark& mark : chart_.marks) {
      if (!std::isfinite(mark.x) || !x_axis_.holds(mark.x)) continue;
      canvas_.line("M" + at(x(mark.x), plot_.y) + "V" + std::to_string(plot_.bottom()), kChartFrame, 1, "4 3",
                   /*arrow=*/false);
      if (std::find(named_.begin(), named_.end(), mark.name) == named_.end()) named_.push_back(mark.name);
    }
  }

  // Calls `draw` with each run of neighbouring points that are to be drawn.
  static void pieces(const std::vector<ChartPoint>& points, bool (*wanted)(const ChartPoint&),
                     const std::function<void(const std::vector<ChartPoint>&)>& draw) {
    std::vector<ChartPoint> piece;
    for (const ChartPoint& point : points) {
      if (drawn(point) && wanted(point)) {
        piece.push_back(point);
      } else if (!piece.empty()) {
        draw(piece);
        piece.clear();
      }
    }
    if (!piece.empty()) draw(piece);
  }

  void draw_bands() {
    for (size_t i = 0; i < chart_.lines.size(); ++i) {
      pieces(chart_.lines[i].points, banded, [&](const std::vector<ChartPoint>& piece) {
        std::string path;
        for (const ChartPoint& p : piece) path += (path.empty() ? "M" : "L") + at(x(p.x), y(*p.high));
        for (auto p = piece.rbegin(); p != piece.rend(); ++p) path += "L" + at(x(p->x), y(*p->low));
        canvas_.area(path + "Z", kColors[i % kColors.size()], "none", 0.18);
      });
    }
  }

  void draw_frame() {
    canvas_.line(
        "M" + at(plot_.x, plot_.y) + "V" + std::to_string(plot_.bottom()) + "H" + std::to_string(plot_.right()),
        kChartFrame, 1, "", /*arrow=*/false);
    canvas_.upward_text({kChartMargin + kChartFont - 2, plot_.y + kPlotHeight / 2},
                        chart_.y_label + (y_axis_.logarithmic ? " (log scale)" : ""), kChartFont, kPlotHeight, kInk);
    canvas_.text({plot_.x + plot_.width / 2, plot_.bottom() + 38}, chart_.x_label, kChartFont,
                 2 * std::min(plot_.x + plot_.width / 2, kChartWidth - plot_.x - plot_.width / 2), kInk,
                 /*bold=*/false, SvgCanvas::Anchor::kMiddle);
  }

  void draw_marker(size_t i, double px, double py) {
    // Every other line has markers that are white inside.
    const std::string_view color = kColors[i % kColors.size()];
    canvas_.area(marker(i, px, py), i % 2 == 0 ? color : "#ffffff", color);
  }

  void draw_line(size_t i) {
    const auto any = [](const ChartPoint&) { return true; };
    pieces(chart_.lines[i].points, any, [&](const std::vector<ChartPoint>& piece) {
      std::string path;
      for (const ChartPoint& p : piece) path += (path.empty() ? "M" : "L") + at(x(p.x), y(p.y));
      if (piece.size() > 1) {
        canvas_.line(path, kColors[i % kColors.size()], 2, kDashes[i % kDashes.size()], /*arrow=*/false);
      }
      for (const ChartPoint& p : piece) draw_marker(i, x(p.x), y(p.y));
    });
  }

  // Returns the height of the picture.
  int draw_legend() {
    const int left = plot_.x, room = kChartWidth - kChartMargin - left;
    Legend legend(canvas_, {left, plot_.bottom() + 60}, room);
    for (size_t i = 0; i < chart_.lines.size(); ++i) {
      const auto sample = [&](int from, int middle) {
        canvas_.line(straight({from, middle}, {from + kSample, middle}), kColors[i % kColors.size()], 2,
                     kDashes[i % kDashes.size()], /*arrow=*/false);
        draw_marker(i, from + kSample / 2, middle);
      };
      legend.item(chart_.lines[i].name, sample, kSample);
    }
    for (const std::string& name : named_) {
      const auto sample = [&](int from, int middle) {
        canvas_.line(straight({from + kSample / 2, middle - 7}, {from + kSample / 2, middle + 7}), kChartFrame, 1,
                     "4 3", /*arrow=*/false);
      };
      legend.item(name, sample, kSample);
    }
    return legend.bottom() + (legend.empty() ? kChartMargin - Legend::kLine : kChartMargin);
  }

  const LineChart& chart_;
  SvgCanvas canvas_;
  Range x_, y_;
  Axis x_axis_, y_axis_;
  Box plot_;
  std::vector<std::string> named_;  // marks that the legend has
};

}  // namespace

std::string line_chart_svg(const LineChart& chart) { return Drawing(chart).draw(); }

}  // namespace annulus
