// See plan_timeline.h.
#include "attention/execution/plan_timeline.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "attention/plan/choice.h"
#include "common/svg/palette.h"
#include "common/svg/ticks.h"
#include "common/text.h"

namespace annulus {
namespace {

constexpr int kComputeHeight = 17, kTransferHeight = 12, kBetweenTimelines = 9, kTimelineLabels = 136;
constexpr int kTimelineFont = 12, kBarFont = 10, kLaneFont = 9;

class TimelineDrawing {
 public:
  TimelineDrawing(SvgCanvas& canvas, const Timeline& timeline, const Box& plot, double seconds,
                  const std::function<std::string(size_t)>& color)
      : canvas_(canvas), timeline_(timeline), plot_(plot), seconds_(seconds > 0 ? seconds : 1), color_(color) {}

  int draw() {
    const int lanes = kComputeHeight + (timeline_.transfers ? 2 * kTransferHeight : 0);
    plot_.height = static_cast<int>(timeline_.ranks.size()) * (lanes + kBetweenTimelines) + kBetweenTimelines;
    draw_axis();
    int y = plot_.y + kBetweenTimelines;
    for (const TimelineRank& rank : timeline_.ranks) {
      draw_rank(rank, y, lanes);
      y += lanes + kBetweenTimelines;
    }
    return plot_.bottom() + 24;
  }

 private:
  int x(double seconds) const {
    return plot_.x + static_cast<int>(std::lround(std::min(seconds / seconds_, 1.0) * plot_.width));
  }

  void draw_axis() {
    const double step = round_distance(seconds_ / 6);
    for (int i = 0; i * step <= seconds_; ++i) {
      const int at = x(i * step);
      canvas_.line(straight({at, plot_.y}, {at, plot_.bottom()}), "#d5dae0", 1, "", /*arrow=*/false);
      canvas_.text({at, plot_.bottom() + 15}, i == 0 ? "0" : seconds_text(i * step), kTimelineFont - 1, 100, kFaint,
                   /*bold=*/false, SvgCanvas::Anchor::kMiddle);
    }
  }

  void draw_rank(const TimelineRank& rank, int y, int lanes) {
    const int label = plot_.x - kTimelineLabels;
    canvas_.text({label, y + lanes / 2 + 4}, "rank " + std::to_string(rank.rank), kTimelineFont, kTimelineLabels - 58,
                 kInk, /*bold=*/true);
    const auto lane = [&](int base, std::string_view text) {
      canvas_.text({plot_.x - 6, base}, text, kLaneFont, 60, kFaint, /*bold=*/false, SvgCanvas::Anchor::kEnd);
    };
    lane(y + 12, "computes");
    if (timeline_.transfers) {
      lane(y + kComputeHeight + 9, "sends");
      lane(y + kComputeHeight + kTransferHeight + 9, "receives");
    }
    for (size_t s = 0; s < rank.steps.size(); ++s) draw_step(rank, s, y);
  }

  // Draws a bar of a step with as much of these texts as it has room for, and a description.
  void bar(double from, double until, int y, int height, const std::string& fill, std::string_view stroke,
           const std::vector<std::string>& texts, const std::string& description) {
    const int left = x(from), width = std::max(1, x(until) - left);
    canvas_.open(description);
    canvas_.box({left, y, width, height}, 0, fill, width > 3 ? stroke : "none");
    const int font = height < kComputeHeight ? kLaneFont : kBarFont;
    for (const std::string& text : texts) {
      if (text_width(text, font) + 4 > width) continue;
      canvas_.text({left + width / 2, y + height / 2 + 4}, text, font, width, text_color_on(fill), /*bold=*/false,
                   SvgCanvas::Anchor::kMiddle);
      break;
    }
    canvas_.close();
  }

  static std::string peers(const std::vector<int>& ranks) {
    return ranks.size() == 1 ? "rank " + std::to_string(ranks.front())
                             : counted(static_cast<int64_t>(ranks.size()), "rank");
  }

  void draw_step(const TimelineRank& rank, size_t s, int y) {
    const TimelineStep& step = rank.steps[s];
    const StepClock& clock = step.clock;
    const std::string where =
        "rank " + std::to_string(rank.rank) + ", " + lower_case(timeline_.name) + " step " + std::to_string(s);
    const std::string color = color_(s);
    if (step.tiles > 0) {
      const std::string own = step.keys_of == rank.rank ? "its own" : "those of rank " + std::to_string(step.keys_of);
      std::vector<std::string> texts = {"step " + std::to_string(s), std::to_string(s)};
      if (step.keys_of >= 0) {
        texts.insert(texts.begin(),
                     {step.keys_of == rank.rank ? "own keys" : "keys of " + std::to_string(step.keys_of)});
      }
      bar(clock.begin, clock.computed, y, kComputeHeight, color, "#ffffff", texts,
          where + ": computes " + counted(static_cast<int64_t>(step.tiles), "tile") + " in " +
              seconds_text(clock.computed - clock.begin) + (step.keys_of >= 0 ? "; the keys are " + own : ""));
    }
    const auto transfer = [&](const std::vector<int>& ranks, double from, double until, double bytes, int top,
                              const char* does, const char* way) {
      if (ranks.empty()) return;
      const std::string to = std::string(way) + " " + peers(ranks);
      bar(from, until, top, kTransferHeight, color, "#ffffff",
          {to, ranks.size() == 1 ? std::to_string(ranks.front()) : ""},
          where + ": " + does + " " + bytes_text(bytes) + " " + to + " in " + seconds_text(until - from));
    };
    transfer(step.to, clock.sent_from, clock.sent, step.sent, y + kComputeHeight, "sends", "to");
    transfer(step.from, clock.received_from, clock.received, step.received, y + kComputeHeight + kTransferHeight,
             "receives", "from");
    if (x(clock.waited) > x(clock.computed)) {
      bar(clock.computed, clock.waited, y, kComputeHeight, std::string(kWaits), kWaitsLine, {"waits"},
          where + ": waits " + seconds_text(clock.waited - clock.computed) + " for transfers or other ranks");
    }
    if (x(clock.end) > x(clock.waited)) {
      bar(clock.waited, clock.end, y, kComputeHeight, std::string(kAdds), "#ffffff", {"adds"},
          where + ": packs, adds and writes for " + seconds_text(clock.end - clock.waited));
    }
  }

  SvgCanvas& canvas_;
  const Timeline& timeline_;
  Box plot_;
  double seconds_;
  const std::function<std::string(size_t)>& color_;
};

}  // namespace

int draw_timeline(SvgCanvas& canvas, const Timeline& timeline, int left, int right, int y, double seconds,
                  const std::function<std::string(size_t)>& color) {
  canvas.text({left, y}, timeline.title, 15, right - left, kInk, /*bold=*/true);
  y = canvas.paragraph({left, y + 19}, timeline.how, kTimelineFont, right - left, kFaint);
  const Box plot{left + kTimelineLabels, y, right - left - kTimelineLabels, 0};
  return TimelineDrawing(canvas, timeline, plot, seconds, color).draw();
}

}  // namespace annulus
