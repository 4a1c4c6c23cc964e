// Counts the pairs of a plan's tiles in the cells of a grid, so that a mask of a million tokens becomes a picture of a
// hundred cells. Used by plan_svg.h alone. Classes for one thread.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "attention/pattern/pattern.h"
#include "attention/plan/layout.h"
#include "attention/plan/plan.h"

namespace annulus {

// The rows or the columns of a grid: positions in some order, cut into cells.
class GridAxis {
 public:
  // Positions in their own order, in at most `most` cells of about the same size.
  static GridAxis in_order(int64_t length, int most);
  // Positions sorted by the rank that owns them, as ranks store them. No cell has positions of two ranks, unless there
  // are more than `most` ranks.
  static GridAxis by_rank(const Layout& layout, int most);

  int cells() const { return static_cast<int>(edges_.size()) - 1; }
  // Cell c has the places [edge(c), edge(c + 1)) of the order.
  int64_t edge(int cell) const { return edges_[static_cast<size_t>(cell)]; }
  int64_t length() const { return edges_.back(); }
  // Returns the parts of `positions` by cells. A cell may have several.
  std::vector<std::pair<int, Span>> parts(const Span& positions) const;

 private:
  struct Piece {
    Span positions;
    int64_t first;  // the place of its first position in the order
  };
  std::vector<Piece> pieces_;
  std::vector<int64_t> edges_;
};

// A grid of pairs, each with a number beside it: the rank that computes it, say.
class MaskGrid {
 public:
  MaskGrid(GridAxis rows, GridAxis columns);

  // Adds the pairs of a tile, of one batch row and head, under a number. `masks` are the program's.
  void add(const Tile& tile, const MaskPlanes& masks, int number);

  struct Cell {
    int number = -1;    // with the most pairs; -1: there are none
    double share = 0;   // of the cell's pairs, those that are counted
    double purity = 0;  // of the counted pairs, those with this number
  };
  Cell cell(int row, int column) const;
  // The pairs by their number.
  const std::vector<double>& pairs() const { return pairs_; }
  const GridAxis& rows() const { return rows_; }
  const GridAxis& columns() const { return columns_; }

 private:
  using Counts = std::vector<std::pair<int, double>>;

  GridAxis rows_, columns_;
  std::vector<Counts> counts_;
  std::vector<double> pairs_;
};

}  // namespace annulus
