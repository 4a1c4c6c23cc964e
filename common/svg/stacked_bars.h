// Draws stacked bars beside a limit as an SVG picture: what takes how much of something of which there is so much, in
// each of several ways. Used by `annulus fit --svg` for the memory of a device.
//
// Thread safety: a function without state.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace annulus {

struct StackedBar {
  std::string group;          // bars of one group, which follow each other, stand close together; said once
  std::string name;           // of the bar
  std::vector<double> parts;  // as many as there are kinds, 0 or more each
  std::string note;           // behind the bar
  bool within = true;         // of the limit; others are drawn faintly
};

struct StackedBars {
  std::string title, subtitle;
  std::string description;         // in words, for those who cannot see the picture
  std::vector<std::string> kinds;  // of parts, at most 7
  std::vector<StackedBar> bars;
  double limit = 0;  // 0: none
  std::string limit_name;
  std::function<std::string(double)> text;  // of an amount: "1.2 GB"
};

// Returns the SVG document. The axis begins at 0. Bars that are far longer than the limit are cut, which their end
// shows.
std::string stacked_bars_svg(const StackedBars& bars);

}  // namespace annulus
