// Tests of attention/execution/mask_grid.h: every position lies in one cell, cells keep to ranks, and the counts of
// cells are those of single pairs.
#include "attention/execution/mask_grid.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <map>
#include <vector>

#include "attention/plan/plan.h"
#include "attention/testing/any_request.h"

namespace annulus::mask_grid_test {
namespace {

// The place of each position in the order of an axis.
std::vector<int64_t> places(const Layout& layout, bool by_rank) {
  std::vector<int64_t> places(static_cast<size_t>(layout.length));
  int64_t place = 0;
  for (int rank = 0; rank < layout.ranks(); ++rank) {
    for (const int64_t position : layout.positions(rank)) {
      places[static_cast<size_t>(position)] = by_rank ? place++ : position;
    }
  }
  return places;
}

int cell_of(const GridAxis& axis, int64_t place) {
  int cell = 0;
  while (axis.edge(cell + 1) <= place) ++cell;
  return cell;
}

TEST(MaskGrid, CellsKeepToRanksWhereThereAreEnough) {
  for (const LayoutKind kind : {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped}) {
    const Layout layout = make_layout(kind, 101, 7);
    const GridAxis axis = GridAxis::by_rank(layout, 30);
    EXPECT_LE(axis.cells(), 30);
    EXPECT_GE(axis.cells(), 25);
    int64_t end = 0;
    for (int rank = 0; rank < 7; ++rank) {
      end += layout.count(rank);
      bool found = false;
      for (int cell = 0; cell < axis.cells(); ++cell) found = found || axis.edge(cell + 1) == end;
      EXPECT_TRUE(found) << rank;
    }
  }
  EXPECT_EQ(GridAxis::by_rank(make_layout(LayoutKind::kStriped, 1000, 100), 30).cells(), 30);
  EXPECT_EQ(GridAxis::in_order(0, 30).cells(), 0);
  EXPECT_EQ(GridAxis::in_order(7, 30).cells(), 7);
  EXPECT_EQ(GridAxis::in_order(int64_t{1} << 40, 30).cells(), 30);
}

RC_GTEST_PROP(MaskGrid, CountsWhatItsCellsHold, ()) {
  const PlanRequest request = resolve_schedule(testing::any_request());
  const Layout queries = query_layout(request), keys = key_layout(request);
  const bool by_rank = *rc::gen::arbitrary<bool>();
  const int most = *rc::gen::inRange(1, 20);
  const auto axis = [&](const Layout& layout) {
    return by_rank ? GridAxis::by_rank(layout, most) : GridAxis::in_order(layout.length, most);
  };
  MaskGrid grid(axis(queries), axis(keys));
  const std::vector<int64_t> row_of = places(queries, by_rank), column_of = places(keys, by_rank);
  std::map<std::pair<int, int>, std::map<int, double>> expected;
  for (const Program& program : make_programs(request)) {
    for (const Step& step : program.forward) {
      for (const Tile& tile : step.tiles) {
        if (tile.mask >= 0) continue;
        grid.add(tile, program.masks, program.rank);
        for (int64_t q = 0; q < tile.query_positions.count; ++q) {
          for (int64_t k = 0; k < tile.key_positions.count; ++k) {
            const int64_t query = tile.query_positions.at(q), key = tile.key_positions.at(k);
            if (!tile.band.contains(query, key)) continue;
            const int row = cell_of(grid.rows(), row_of[static_cast<size_t>(query)]);
            const int column = cell_of(grid.columns(), column_of[static_cast<size_t>(key)]);
            ++expected[{row, column}][program.rank];
          }
        }
      }
    }
  }
  for (int row = 0; row < grid.rows().cells(); ++row) {
    for (int column = 0; column < grid.columns().cells(); ++column) {
      double all = 0, most_pairs = 0;
      for (const auto& [rank, pairs] : expected[{row, column}]) {
        all += pairs;
        most_pairs = std::max(most_pairs, pairs);
      }
      const MaskGrid::Cell cell = grid.cell(row, column);
      RC_ASSERT((cell.number < 0) == (all == 0));
      if (all == 0) continue;
      const int64_t area = (grid.rows().edge(row + 1) - grid.rows().edge(row)) *
                           (grid.columns().edge(column + 1) - grid.columns().edge(column));
      RC_ASSERT((expected[{row, column}][cell.number]) == most_pairs);
      RC_ASSERT(cell.share == all / static_cast<double>(area));
      RC_ASSERT(cell.purity == most_pairs / all);
    }
  }
}

}  // namespace
}  // namespace annulus::mask_grid_test
