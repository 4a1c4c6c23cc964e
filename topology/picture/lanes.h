// Lines between hosts that stand in rows: below each row runs a band of lanes, and beside the rows two gutters, so that
// no two lines lie on one another. Within this room only.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace annulus {

// Intervals that share a lane do not touch.
class Lanes {
 public:
  // The lane of [from, to], in any order, the first that is free there.
  int take(int from, int to);
  int count() const { return static_cast<int>(lanes_.size()); }

 private:
  std::vector<std::vector<std::pair<int, int>>> lanes_;
};

// A line from below a host of one row to below a host of another or the same. Its x count from the left gutter's
// beginning.
struct Route {
  int from_row = 0, from_x = 0, to_row = 0, to_x = 0;
};

class Router {
 public:
  static constexpr int kLane = 9;  // pixels from lane to lane

  explicit Router(int rows) : bands_(static_cast<size_t>(rows)) {}

  // First all lines are told, then the heights and widths that they need are known, then their paths.
  // `right`: where the right gutter begins.
  void add(const Route& route, int right);
  int band_height(int row) const;
  int left_width() const { return gutters_[0].count() * kLane; }
  int right_width() const { return gutters_[1].count() * kLane; }

  // The path of the i-th line, from (from_x, from_y) to (to_x, to_y). `band_tops` by row; the gutters begin at `left`,
  // leftwards, and at `right`, rightwards.
  std::string path(size_t i, int from_y, int to_y, const std::vector<int>& band_tops, int left, int right) const;

 private:
  struct Line {
    Route route;
    int from_lane = 0, to_lane = 0, gutter = 0, gutter_lane = 0;
  };
  std::vector<Lanes> bands_;
  Lanes gutters_[2];
  std::vector<Line> lines_;
};

}  // namespace annulus
