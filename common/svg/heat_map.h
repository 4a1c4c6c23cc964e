// Draws shares over a grid as an SVG picture for documents and papers: a cell for each row and column, coloured from
// light (0) to dark (1) and with its number in it, and the scale beside the grid. The scale is one hue of falling
// lightness, so it reads the same in grey and to people with colour blindness. Used by runtime/evaluation/report.h.
//
// Thread safe.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace annulus {

struct HeatMap {
  std::string title, subtitle;  // the subtitle may be empty
  std::string x_label, y_label;
  std::string scale_label;  // says what a share is; percent is added
  std::vector<std::string> columns, rows;
  // [rows][columns]: shares from 0 to 1. A cell without one is drawn white with a dash.
  std::vector<std::vector<std::optional<double>>> shares;
};

// Returns the SVG document. Without rows of text (all empty) the y axis has no label. Raises Error(kInternal) if the
// shares do not have the shape of rows and columns, or are not from 0 to 1.
std::string heat_map_svg(const HeatMap& map);

}  // namespace annulus
