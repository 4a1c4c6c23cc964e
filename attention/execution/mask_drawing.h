// Draws a grid of pairs, each cell in the colour of a number: of the rank that computes its pairs, say. Used by
// plan_svg.h alone. A class for one thread.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "attention/execution/mask_grid.h"
#include "common/svg/canvas.h"

namespace annulus {

inline constexpr std::string_view kSeveral = "#c3cad2";  // of cells that belong to several numbers
inline constexpr std::string_view kMasked = "#eef1f4";   // of pairs that are not counted

// The path of a box, in coordinates of the page.
std::string box_path(const Box& box);

class MaskDrawing {
 public:
  // The grid must outlive it.
  MaskDrawing(const MaskGrid& grid, const Box& area) : grid_(grid), area_(area) {}

  // Returns the coordinate of a place of an axis that begins at `from` and is `side` pixels long.
  static int at(const GridAxis& axis, int64_t place, int from, int side);

  // Draws the cells, those of each number as one thing with a description. Cells of which no number has most pairs by
  // far get the number `several`, unless that is negative.
  void draw(SvgCanvas& canvas, int several, const std::function<std::string(int)>& color,
            const std::function<std::string(int)>& description);

  bool any_several() const { return any_several_; }
  bool any_faint() const { return any_faint_; }  // whether few pairs of some cell are counted

 private:
  // Cells of which less is counted are fainter.
  static constexpr size_t kShades = 3;
  using Class = std::pair<int, size_t>;  // number and shade

  void find_classes(int several);
  void merge();
  int x(int column) const { return at(grid_.columns(), grid_.columns().edge(column), area_.x, area_.width); }
  int y(int row) const { return at(grid_.rows(), grid_.rows().edge(row), area_.y, area_.height); }

  const MaskGrid& grid_;
  const Box area_;
  std::vector<std::vector<Class>> classes_;
  std::map<int, std::array<std::string, kShades>> paths_;
  bool any_several_ = false, any_faint_ = false;
};

}  // namespace annulus
