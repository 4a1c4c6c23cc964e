// Routes lines between hosts that are drawn in rows, without overlaps, through a band of lanes below each row and two
// gutters beside the rows. Used by topology_svg.cc.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace annulus {

// Assigns intervals to lanes so that intervals in a lane do not touch.
class Lanes {
 public:
  // Reserves the interval between `from` and `to` (in either order) in the first lane where it is free, and returns the
  // lane.
  int take(int from, int to);
  int count() const { return static_cast<int>(lanes_.size()); }

 private:
  std::vector<std::vector<std::pair<int, int>>> lanes_;
};

// A line from below a host of one row to below a host of the same or another row. `from_x` and `to_x` count from the
// left edge of the rows.
struct Route {
  int from_row = 0, from_x = 0, to_row = 0, to_x = 0;
};

class Router {
 public:
  static constexpr int kLane = 9;  // pixels between lanes

  explicit Router(int rows) : bands_(rows) {}

  // Adds a line. Add all lines before calling the functions below. `right` is where the right gutter begins.
  void add(const Route& route, int right);
  int band_height(int row) const;
  int left_width() const { return gutters_[0].count() * kLane; }
  int right_width() const { return gutters_[1].count() * kLane; }

  // Returns the path of the i-th line, from (from_x, from_y) to (to_x, to_y). `band_tops` holds the top of each row's
  // band; the left gutter extends leftwards from `left`, the right one rightwards from `right`.
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
