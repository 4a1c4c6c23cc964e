// Draws when ranks compute, send and receive in one direction of a plan, by a clock for each rank. Used by plan_svg.h
// alone. A function without state.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "attention/plan/time.h"
#include "common/svg/canvas.h"

namespace annulus {

// What a rank does in one step.
struct TimelineStep {
  StepClock clock;
  size_t tiles = 0;
  int keys_of = -1;           // the rank that owns the keys of all tiles; -1: several ranks do, or there are no tiles
  std::vector<int> to, from;  // peers
  double sent = 0, received = 0;  // bytes
};

struct TimelineRank {
  int rank = 0;
  RankTime time;
  std::vector<TimelineStep> steps;
};

struct Timeline {
  std::string name;   // "Forward"
  std::string title;  // one line
  std::string how;    // how to read it
  std::vector<TimelineRank> ranks;
  bool transfers = true;  // whether any rank sends
};

inline constexpr std::string_view kWaits = "#e4e7eb", kWaitsLine = "#9aa5b1", kAdds = "#5c6670";

// Draws it into the page between x coordinates `left` and `right`, from `y` on, and returns the y coordinate below.
// `seconds` is where the axis ends; `color` returns the colour of a step.
int draw_timeline(SvgCanvas& canvas, const Timeline& timeline, int left, int right, int y, double seconds,
                  const std::function<std::string(size_t)>& color);

}  // namespace annulus
