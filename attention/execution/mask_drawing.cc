// See mask_drawing.h.
#include "attention/execution/mask_drawing.h"

#include <algorithm>

namespace annulus {
namespace {

constexpr std::array<double, 3> kOpacities = {1, 0.6, 0.35}, kLeastShares = {0.3, 0.06, 0};  // by shade
constexpr double kMost = 0.6;  // a cell of whose pairs less than this share has one number belongs to several
constexpr int kApart = 9;      // pixels from which on cells are drawn apart from each other

}  // namespace

std::string box_path(const Box& box) {
  return "M" + std::to_string(box.x) + " " + std::to_string(box.y) + "H" + std::to_string(box.right()) + "V" +
         std::to_string(box.bottom()) + "H" + std::to_string(box.x) + "Z";
}

int MaskDrawing::at(const GridAxis& axis, int64_t place, int from, int side) {
  if (axis.length() == 0) return from;
  return from + static_cast<int>(static_cast<double>(place) * side / static_cast<double>(axis.length()) + 0.5);
}

void MaskDrawing::draw(SvgCanvas& canvas, int several, const std::function<std::string(int)>& color,
                       const std::function<std::string(int)>& description) {
  canvas.box(area_, 0, kMasked, "none");
  find_classes(several);
  merge();
  for (const auto& [number, paths] : paths_) {
    canvas.open(description(number));
    for (size_t shade = 0; shade < kShades; ++shade) {
      if (!paths[shade].empty()) canvas.area(paths[shade], color(number), "none", kOpacities[shade]);
    }
    canvas.close();
  }
}

void MaskDrawing::find_classes(int several) {
  classes_.assign(static_cast<size_t>(grid_.rows().cells()), {});
  for (int r = 0; r < grid_.rows().cells(); ++r) {
    for (int c = 0; c < grid_.columns().cells(); ++c) {
      const MaskGrid::Cell cell = grid_.cell(r, c);
      size_t shade = 0;
      while (shade + 1 < kShades && cell.share < kLeastShares[shade]) ++shade;
      const bool among = several >= 0 && cell.number >= 0 && cell.purity < kMost;
      any_several_ = any_several_ || among;
      any_faint_ = any_faint_ || (cell.number >= 0 && shade > 0);
      classes_[static_cast<size_t>(r)].push_back({among ? several : cell.number, shade});
    }
  }
}

// Draws runs of equal cells in a row as one box, and equal runs in rows below each other. Large cells are apart.
void MaskDrawing::merge() {
  const int rows = grid_.rows().cells(), columns = grid_.columns().cells();
  const bool apart = columns > 0 && rows > 0 && area_.width / columns >= kApart && area_.height / rows >= kApart;
  std::map<std::pair<int, int>, std::pair<int, Class>> open;  // columns -> first row, class
  const auto end = [&](const std::pair<int, int>& run, int first, int past, const Class& what) {
    const int gap = apart ? 1 : 0;
    Box box{x(run.first), y(first), 0, 0};
    box.width = x(run.second) - box.x - gap;
    box.height = y(past) - box.y - gap;
    if (what.first >= 0) paths_[what.first][what.second] += box_path(box);
  };
  for (int r = 0; r < rows; ++r) {
    std::map<std::pair<int, int>, std::pair<int, Class>> next;
    for (int c = 0; c < columns;) {
      const Class what = classes_[static_cast<size_t>(r)][static_cast<size_t>(c)];
      int past = c + 1;
      while (!apart && past < columns && classes_[static_cast<size_t>(r)][static_cast<size_t>(past)] == what) ++past;
      const auto above = open.find({c, past});
      const bool goes_on = !apart && above != open.end() && above->second.second == what;
      next[{c, past}] = {goes_on ? above->second.first : r, what};
      if (goes_on) open.erase(above);
      c = past;
    }
    for (const auto& [run, began] : open) end(run, began.first, r, began.second);
    open = std::move(next);
  }
  for (const auto& [run, began] : open) end(run, began.first, rows, began.second);
}

}  // namespace annulus
