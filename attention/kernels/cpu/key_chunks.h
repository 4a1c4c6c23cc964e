// The chunks of keys over which flash attention on CPUs iterates: their keys, the packing of their rows as operands of
// products, and the accumulation of their dk and dv. Used by flash.cc.
#pragma once

#include <algorithm>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention/kernels/cpu/flash.h"
#include "attention/tiles/tile_groups.h"

namespace annulus::cpu_flash {

// Rows are read in place only if parts have at least so many keys on average: shorter products spend too much time on
// loading and storing their accumulators.
inline constexpr int64_t kFewestInPlace = 32;

// Padding between packed rows, in elements. At power-of-two strides rows would compete for few sets of the L1 cache.
inline constexpr int64_t kRowGap = 16;

inline int64_t round_up(int64_t n, int64_t unit) { return ceil_div(n, unit) * unit; }

inline StoredRows from_row(StoredRows rows, int64_t row) {
  rows.data = static_cast<const char*>(rows.data) + row * rows.step * width_of(rows.storage);
  return rows;
}

template <typename T>
T* room(ScratchBuffer<T>& buffer, int64_t elements) {
  if (static_cast<int64_t>(buffer.size()) < elements) buffer.resize(static_cast<size_t>(elements));
  return buffer.data();
}

template <typename T>
T* zeros(ScratchBuffer<T>& buffer, int64_t elements) {
  T* const data = room(buffer, elements);
  std::fill_n(data, elements, T{0});
  return data;
}

// The keys [first, past) of a piece, as part of a chunk.
template <typename T>
struct Part {
  const KeyPiece<T>* piece;
  int64_t first, past;
  int64_t column;  // of its first key, among the chunk's keys
  bool cut;        // whether the band hides some pair

  int64_t count() const { return past - first; }
  Run columns() const { return {column, column + count()}; }
  // Returns the columns from the first to the last key that some of these queries see.
  Run seen_by(const Span& queries) const {
    const Span seen = keys_seen(queries, piece->positions, piece->band);
    const int64_t begin = std::clamp(seen.begin, first, past), end = std::clamp(seen.begin + seen.count, begin, past);
    return {column + begin - first, column + end - first};
  }
  // Sets, for each query i, the columns [begin[i], end[i]) that it sees; none if end[i] <= begin[i].
  void seen_by_each(const Span& queries, int64_t* begin, int64_t* end) const {
    const Span& keys = piece->positions;
    const Band& band = piece->band;
    const auto column_of = [&](int64_t key) { return column - first + std::clamp(key, first, past); };
    std::fill_n(begin, queries.count, column);
    std::fill_n(end, queries.count, column + count());
    if (!cut) return;
    if (!band.unbounded_below()) {
      const int64_t distance = band.lo + queries.begin - keys.begin;
      for (int64_t i = 0; i < queries.count; ++i) begin[i] = column_of(first_from(keys, distance + i * queries.stride));
    }
    if (!band.unbounded_above()) {
      const int64_t distance = band.hi + queries.begin - keys.begin;
      for (int64_t i = 0; i < queries.count; ++i) end[i] = column_of(past_to(keys, distance + i * queries.stride));
    }
  }
};

// Chunks of at most kMostKeys keys that some row sees, the same blocks for all keys of a chunk.
template <typename T>
class Chunks {
 public:
  Chunks(std::span<const QueryBlock<T>> blocks, std::span<const KeyPiece<T>> pieces) {
    int64_t columns = 0;
    const auto end_chunk = [&] {
      if (columns > 0) past_.push_back(parts_.size());
      columns = 0;
    };
    for (const KeyPiece<T>& piece : pieces) {
      if (columns > 0 && !std::ranges::equal(piece.blocks, parts_.back().piece->blocks)) end_chunk();
      int64_t first = piece.positions.count, past = 0;          // seen by some row of a block
      int64_t by_all = 0, by_all_past = piece.positions.count;  // seen by every row of all blocks
      for (const int b : piece.blocks) {
        const Span& queries = blocks[static_cast<size_t>(b)].positions;
        const Span seen = keys_seen(queries, piece.positions, piece.band);
        if (!seen.empty()) first = std::min(first, seen.begin), past = std::max(past, seen.begin + seen.count);
        const Span by_first = keys_seen(queries.sub(0, 1), piece.positions, piece.band);
        by_all_past = std::min(by_all_past, by_first.begin + by_first.count);
        by_all = std::max(by_all, keys_seen(queries.sub(queries.count - 1, 1), piece.positions, piece.band).begin);
      }
      while (first < past) {
        const int64_t n = std::min(past - first, kMostKeys - columns);
        parts_.push_back({&piece, first, first + n, columns, by_all > first || by_all_past < first + n});
        first += n, columns += n;
        if (columns == kMostKeys) end_chunk();
      }
    }
    end_chunk();
  }

  size_t size() const { return past_.size(); }
  // Returns the parts of a chunk; none if there is no such chunk.
  std::span<const Part<T>> operator[](size_t chunk) const {
    if (chunk >= size()) return {};
    const size_t first = chunk == 0 ? 0 : past_[chunk - 1];
    return std::span(parts_).subspan(first, past_[chunk] - first);
  }
  // Returns the ascending indices of the blocks that see some of its keys.
  std::span<const int> blocks(size_t chunk) const { return (*this)[chunk].front().piece->blocks; }

 private:
  std::vector<Part<T>> parts_;
  std::vector<size_t> past_;  // for each chunk, one past the index of its last part
};

// Returns the number of keys of a chunk.
template <typename T>
int64_t columns_of(std::span<const Part<T>> parts) {
  return parts.back().column + parts.back().count();
}

// Zeroes the columns [columns, past) of panels with `length` rows: products multiply them by 0, but uninitialized
// memory may not be finite.
template <typename T>
void clear_columns(T* panels, int64_t panel, int64_t length, int64_t columns, int64_t past) {
  for (int64_t c = columns; c < past; ++c) {
    T* const to = panels + c / panel * panel * length + c % panel;
    for (int64_t i = 0; i < length; ++i) to[i * panel] = 0;
  }
}

// Zeroes the rows [rows, past) of rows packed by TileMath::stack, of which `rows` have been packed.
template <typename T>
void clear_rows(T* stacked, int64_t width, int64_t together, int64_t rows, int64_t past) {
  std::fill(stacked + ceil_div(rows, together) * width, stacked + ceil_div(past, together) * width, T{0});
}

// The rows of the columns [first, past) of a chunk's keys or values, as the second operand of add_product.
template <typename T>
struct KeyRows {
  int64_t first, past;
  const T* data;
  int64_t step;
};

// Finds the rows of a chunk's keys or values (`rows_of`): in place if possible, otherwise packed in `buffer`.
template <typename T>
void find_rows(const TileMath<T>& math, std::span<const Part<T>> parts, StoredRows KeyPiece<T>::*rows_of, int64_t dim,
               ScratchBuffer<T>& buffer, std::vector<KeyRows<T>>& found) {
  constexpr ElementType kNumbers = std::is_same_v<T, double> ? ElementType::kDouble : ElementType::kFloat;
  const auto numbers = [&](const Part<T>& part) { return (part.piece->*rows_of).storage == kNumbers; };
  const int64_t columns = columns_of(parts);
  const bool long_parts = columns >= kFewestInPlace * static_cast<int64_t>(parts.size());
  const bool whole_vectors = math.together == 1 && dim % math.lanes == 0;
  found.clear();
  if (long_parts && whole_vectors && std::ranges::all_of(parts, numbers)) {
    for (const Part<T>& part : parts) {
      const StoredRows rows = from_row(part.piece->*rows_of, part.first);
      found.push_back({part.column, part.column + part.count(), static_cast<const T*>(rows.data), rows.step});
    }
    return;
  }
  const int64_t width = round_up(dim, math.lanes) + kRowGap, padded = round_up(columns, math.lanes);
  T* const packed = room(buffer, ceil_div(padded, math.together) * width);
  for (const Part<T>& part : parts) {
    math.stack(from_row(part.piece->*rows_of, part.first), part.count(), dim, packed, width, part.column);
  }
  clear_rows(packed, width, math.together, columns, padded);
  found.push_back({0, padded, packed, width});
}

// Computes c[r] = keep[r] * c[r] + sum over the columns j of `runs` of a[r][j] * keys(j), for n rows r of c, of `width`
// elements. A null keep means 1.
template <typename T>
void add_rows(const TileMath<T>& math, int64_t n, const T* a, int64_t a_step, const std::vector<Run>& runs,
              const std::vector<KeyRows<T>>& keys, T* c, int64_t width, const T* keep) {
  for (const Run& run : runs) {
    for (const KeyRows<T>& rows : keys) {
      const int64_t first = std::max(run.first, rows.first), past = std::min(run.past, rows.past);
      if (first >= past) continue;
      math.add_product(n, a + first / math.together, a_step, 1,
                       rows.data + (first - rows.first) / math.together * rows.step, rows.step,
                       (past - first) / math.together, c, width, width, keep, false);
      keep = nullptr;
    }
  }
}

// Returns the range from the first to the last row of `queries` that sees some of the keys [first, past) of a piece.
template <typename T>
Span rows_that_see(const KeyPiece<T>& piece, int64_t first, int64_t past, const Span& queries) {
  const Band& band = piece.band;  // queries and keys exchange roles
  return keys_seen(piece.positions.sub(first, past - first), queries, {-band.hi, -band.lo});
}

// Returns the range from the first to the last row of `queries` that sees some key of a chunk.
template <typename T>
Span rows_that_see(std::span<const Part<T>> parts, const Span& queries) {
  int64_t begin = queries.count, end = 0;
  for (const Part<T>& part : parts) {
    const Span rows = rows_that_see(*part.piece, part.first, part.past, queries);
    if (!rows.empty()) begin = std::min(begin, rows.begin), end = std::max(end, rows.begin + rows.count);
  }
  return begin < end ? Span::range(begin, end) : Span();
}

// The keys of a register tile in the computation of dk and dv.
struct KeyTile {
  int64_t column, keys;         // column: of its first key, in the chunk
  int64_t first = 0, past = 0;  // the range of the block's rows that see some of these keys
  bool has_sums = false;        // whether some row has contributed gradients
};

// The dk and dv of a chunk from the query rows of one call, in scratch memory padded to whole register tiles
// (add_gradients adds them to the pieces). Summing first within a call and then over calls bounds the error, which in
// one sum would grow with the length of the sequence (Blanchard, Higham and Mary, A class of fast and accurate
// summation algorithms, 2020).
template <typename T>
struct KeySums {
  Rows<T> dk, dv;  // one row per column

  // For a chunk of `columns` keys with rows of `width` elements.
  KeySums(const TileMath<T>& math, int64_t columns, int64_t width, FlashScratch<T>& scratch)
      : dk{room(scratch.dk, round_up(columns, math.rows) * width), width},
        dv{room(scratch.dv, round_up(columns, math.rows) * width), width} {}
};

// Finds the rows that see the keys of each tile. The tiles are in the order of their columns.
template <typename T>
void find_rows_that_see(std::span<const Part<T>> parts, const Span& queries, std::vector<KeyTile>& tiles) {
  size_t before = 0;  // parts that end before the tile begins
  for (KeyTile& tile : tiles) {
    const int64_t end = tile.column + tile.keys;
    while (parts[before].column + parts[before].count() <= tile.column) ++before;
    tile.first = queries.count, tile.past = 0;
    for (size_t i = before; i < parts.size() && parts[i].column < end; ++i) {
      const Part<T>& part = parts[i];
      const int64_t first = std::max(part.column, tile.column), past = std::min(part.column + part.count(), end);
      const int64_t key = part.first - part.column;  // of column 0
      const Span rows = rows_that_see(*part.piece, key + first, key + past, queries);
      if (rows.empty()) continue;
      tile.first = std::min(tile.first, rows.begin), tile.past = std::max(tile.past, rows.begin + rows.count);
    }
  }
}

// Divides the keys of a chunk into register tiles of `rows` keys, in the order of their columns.
inline void find_tiles(int64_t columns, int64_t rows, std::vector<KeyTile>& tiles) {
  tiles.clear();
  for (int64_t j = 0; j < columns; j += rows) tiles.push_back({j, std::min(rows, columns - j)});
}

// Zeroes p and ds of the query rows row, ..., row + rows - 1 in columns outside `runs`, which have no scores but are
// read by the products that compute a tile's dk and dv. p and ds point to the first of these rows, of which only the
// first `used` are written.
template <typename T>
void clear_unseen(const std::vector<KeyTile>& tiles, const std::vector<Run>& runs, int64_t row, int64_t rows,
                  int64_t used, T* p, T* ds, int64_t step) {
  const auto clear = [&](int64_t first, int64_t past) {
    for (int64_t r = 0; r < used && first < past; ++r) {
      std::fill(p + r * step + first, p + r * step + past, T{0});
      std::fill(ds + r * step + first, ds + r * step + past, T{0});
    }
  };
  size_t before = 0;  // runs that end before the tile begins
  for (const KeyTile& tile : tiles) {
    if (tile.past <= row || tile.first >= row + rows) continue;
    const int64_t end = tile.column + tile.keys;
    while (before < runs.size() && runs[before].past <= tile.column) ++before;
    int64_t from = tile.column;  // without scores from here on
    for (size_t i = before; i < runs.size() && runs[i].first < end; ++i) {
      clear(from, runs[i].first);
      from = runs[i].past;
    }
    clear(from, end);
  }
}

// Adds the gradients of a chunk, dk times `scale`, to those of the pieces, or sets rows that have not been written.
template <typename T>
void add_gradients(const TileMath<T>& math, std::span<const Part<T>> parts, const std::vector<KeyTile>& tiles,
                   const KeySums<T>& sums, int64_t dim, T scale) {
  for (const Part<T>& part : parts) {
    const KeyPiece<T>& piece = *part.piece;
    for (int64_t j = 0; j < part.count(); ++j) {
      const int64_t column = part.column + j, row = part.first + j;
      if (!tiles[static_cast<size_t>(column / math.rows)].has_sums) continue;
      const Put how = piece.written.test_and_set(row) ? Put::kAdd : Put::kSet;
      math.put(sums.dk.at(column), dim, scale, piece.dk.at(row), how);
      math.put(sums.dv.at(column), dim, T{1}, piece.dv.at(row), how);
    }
  }
}

}  // namespace annulus::cpu_flash
