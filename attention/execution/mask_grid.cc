// See mask_grid.h.
#include "attention/execution/mask_grid.h"

#include <algorithm>

namespace annulus {
namespace {

// Adds the ends of cells that divide the places [first, past) into `cells` parts, those without a place left out.
void cut(std::vector<int64_t>& edges, int64_t first, int64_t past, int64_t cells) {
  for (int64_t c = 1; c <= cells; ++c) {
    const int64_t edge = first + (past - first) / cells * c + (past - first) % cells * c / cells;
    if (edge > edges.back()) edges.push_back(edge);
  }
}

int64_t pairs_of_part(const Span& queries, const Span& keys, const Tile& tile, const MaskPlanes& masks) {
  if (tile.mask < 0) {
    const int64_t nearest = keys.begin - queries.last(), farthest = keys.last() - queries.begin;
    if (farthest < tile.band.lo || nearest > tile.band.hi) return 0;
    if (tile.band.lo <= nearest && farthest <= tile.band.hi) return queries.count * keys.count;
  }
  const Slice slice{{0, 1, 1}, {0, 1, 1}, queries, keys, tile.band, tile.mask};
  return count_pairs({.shape = {}, .slices = {slice}, .masks = tile.mask < 0 ? MaskPlanes() : masks});
}

}  // namespace

GridAxis GridAxis::in_order(int64_t length, int most) {
  GridAxis axis;
  axis.pieces_.push_back({Span::range(0, length), 0});
  axis.edges_.push_back(0);
  cut(axis.edges_, 0, length, most);
  return axis;
}

GridAxis GridAxis::by_rank(const Layout& layout, int most) {
  GridAxis axis;
  axis.edges_.push_back(0);
  const bool apart = layout.ranks() <= most;
  int64_t place = 0;
  for (int rank = 0; rank < layout.ranks(); ++rank) {
    const int64_t first = place;
    for (const Span& span : layout.spans[static_cast<size_t>(rank)]) {
      if (!span.empty()) axis.pieces_.push_back({span, place});
      place += std::max<int64_t>(span.count, 0);
    }
    if (apart) cut(axis.edges_, first, place, most / layout.ranks());
  }
  if (!apart) cut(axis.edges_, 0, place, most);
  return axis;
}

std::vector<std::pair<int, Span>> GridAxis::parts(const Span& positions) const {
  std::vector<std::pair<int, Span>> out;
  int64_t left = positions.count;
  for (const Piece& piece : pieces_) {
    if (left <= 0) break;
    if (piece.positions.begin > positions.last() || piece.positions.last() < positions.begin) {
      continue;
    }
    const Span common = intersect(piece.positions, positions);
    if (common.empty()) continue;
    left -= common.count;
    const int64_t first = piece.first + piece.positions.index_of(common.begin);
    const int64_t step = std::max<int64_t>(1, common.stride / piece.positions.stride);
    auto edge = std::upper_bound(edges_.begin(), edges_.end(), first);
    for (int64_t i = 0; i < common.count; ++edge) {
      const int64_t past = std::min(common.count, ceil_div(*edge - first, step));
      if (past > i) out.emplace_back(static_cast<int>(edge - edges_.begin()) - 1, common.sub(i, past - i));
      i = std::max(i, past);
    }
  }
  return out;
}

MaskGrid::MaskGrid(GridAxis rows, GridAxis columns)
    : rows_(std::move(rows)),
      columns_(std::move(columns)),
      counts_(static_cast<size_t>(rows_.cells()) * static_cast<size_t>(columns_.cells())) {}

void MaskGrid::add(const Tile& tile, const MaskPlanes& masks, int number) {
  pairs_.resize(std::max(pairs_.size(), static_cast<size_t>(number) + 1));
  const auto columns = columns_.parts(tile.key_positions);
  for (const auto& [row, queries] : rows_.parts(tile.query_positions)) {
    for (const auto& [column, keys] : columns) {
      const auto pairs = static_cast<double>(pairs_of_part(queries, keys, tile, masks));
      if (pairs == 0) continue;
      pairs_[static_cast<size_t>(number)] += pairs;
      Counts& counts =
          counts_[static_cast<size_t>(row) * static_cast<size_t>(columns_.cells()) + static_cast<size_t>(column)];
      // From the back, because programs are added rank by rank and step by step.
      const auto same = std::find_if(counts.rbegin(), counts.rend(), [&](const auto& c) { return c.first == number; });
      if (same != counts.rend()) {
        same->second += pairs;
      } else {
        counts.emplace_back(number, pairs);
      }
    }
  }
}

MaskGrid::Cell MaskGrid::cell(int row, int column) const {
  Cell cell;
  double most = 0, all = 0;
  for (const auto& [number, pairs] :
       counts_[static_cast<size_t>(row) * static_cast<size_t>(columns_.cells()) + static_cast<size_t>(column)]) {
    all += pairs;
    if (pairs > most) cell.number = number, most = pairs;
  }
  if (all == 0) return cell;
  const auto side = [](const GridAxis& axis, int c) { return static_cast<double>(axis.edge(c + 1) - axis.edge(c)); };
  cell.share = all / (side(rows_, row) * side(columns_, column));
  cell.purity = most / all;
  return cell;
}

}  // namespace annulus
