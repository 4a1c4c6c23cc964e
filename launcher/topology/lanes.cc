// See lanes.h.
#include "launcher/topology/lanes.h"

#include <algorithm>

namespace annulus {

int Lanes::take(int from, int to) {
  const std::pair<int, int> wanted = std::minmax(from, to);
  for (size_t lane = 0;; ++lane) {
    if (lane == lanes_.size()) lanes_.emplace_back();
    const auto free = [&](const std::pair<int, int>& taken) {
      return wanted.second < taken.first || taken.second < wanted.first;
    };
    if (!std::all_of(lanes_[lane].begin(), lanes_[lane].end(), free)) continue;
    lanes_[lane].push_back(wanted);
    return static_cast<int>(lane);
  }
}

// Lines to a lower row use the right gutter, lines to a higher row the left one, so a ring over all hosts is a loop.
void Router::add(const Route& route, int right) {
  Line line{route};
  Lanes& from = bands_[route.from_row];
  if (route.from_row == route.to_row) {
    line.from_lane = from.take(route.from_x, route.to_x);
  } else {
    line.gutter = route.from_row < route.to_row ? 1 : 0;
    const int side = line.gutter == 1 ? right : 0;
    line.from_lane = from.take(route.from_x, side);
    line.to_lane = bands_[route.to_row].take(route.to_x, side);
    line.gutter_lane = gutters_[line.gutter].take(route.from_row, route.to_row);
  }
  lines_.push_back(line);
}

int Router::band_height(int row) const {
  const int lanes = bands_[row].count();
  return lanes == 0 ? 0 : (lanes + 1) * kLane;
}

std::string Router::path(size_t i, int from_y, int to_y, const std::vector<int>& band_tops, int left, int right) const {
  const Line& line = lines_[i];
  const Route& route = line.route;
  const auto y_of = [&](int row, int lane) { return band_tops[row] + (lane + 1) * kLane; };
  const int first = y_of(route.from_row, line.from_lane);
  std::string path =
      "M" + std::to_string(left + route.from_x) + " " + std::to_string(from_y) + "V" + std::to_string(first);
  if (route.from_row != route.to_row) {
    const int offset = (line.gutter_lane + 1) * kLane;
    path += "H" + std::to_string(line.gutter == 1 ? right + offset : left - offset) + "V" +
            std::to_string(y_of(route.to_row, line.to_lane));
  }
  return path + "H" + std::to_string(left + route.to_x) + "V" + std::to_string(to_y);
}

}  // namespace annulus
