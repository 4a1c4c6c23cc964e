// Draws lines over a logarithmic axis of positions or lengths as an SVG picture for documents and papers: no scripts,
// readable in a column of 3.3 inches, and lines that differ by colour, dash and marker, so that they can be told apart
// without colours. Used by runtime/evaluation/report.h.
//
// Thread safe.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace annulus {

struct ChartPoint {
  double x = 0, y = 0;
  std::optional<double> low{}, high{};  // the ends of an interval around y, which is drawn as a band; both or none
};

struct ChartLine {
  std::string name;  // for the legend
  std::vector<ChartPoint> points;
};

// A vertical line; its name stands in the legend, once for all marks of one name.
struct ChartMark {
  double x = 0;
  std::string name;
};

struct LineChart {
  std::string title, subtitle;  // the subtitle may be empty
  std::string x_label, y_label;
  std::vector<ChartLine> lines;
  std::vector<ChartMark> marks;
};

// Returns the SVG document. x is logarithmic with ticks at powers of two, "1K" for 1024; y is linear, or logarithmic if
// the values are positive and the largest is over five times the least. Points are left out, and a line is drawn in
// pieces between them, unless x is from 1 to 2^60, and y a number of at most 1e300. Marks outside of the axis are left
// out.
std::string line_chart_svg(const LineChart& chart);

}  // namespace annulus
