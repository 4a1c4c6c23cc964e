// The chunks in which flash attention on CPUs goes through the keys of a block of query rows: which keys a chunk has,
// how their rows become operands of products, and where the gradients of its keys and values are added up. Used by
// flash.cc.
#pragma once

#include <algorithm>
#include <span>
#include <type_traits>
#include <vector>

#include "attention/cpu_flash/flash.h"
#include "attention/tiles/tile_groups.h"

namespace annulus::cpu_flash {

// The keys that a run of rows has on average, at least, where rows are read in place: products over fewer rows spend
// too much on what they add to.
inline constexpr int64_t kFewestInPlace = 32;

// Elements between packed rows. The lines of rows that are a power of two apart would compete for a few places in the
// first-level cache.
inline constexpr int64_t kRowGap = 16;

inline int64_t round_up(int64_t n, int64_t unit) { return ceil_div(n, unit) * unit; }

inline int64_t width_of(Storage storage) {
  return storage == Storage::kDouble ? 8 : storage == Storage::kFloat ? 4 : 2;
}

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
  int64_t column;  // the column of its first key among the chunk's keys
  bool cut;        // whether its band hides some of these pairs

  int64_t count() const { return past - first; }
  // The columns of the keys that some of these queries see.
  Run seen_by(const Span& queries) const {
    const Span seen = keys_seen(queries, piece->positions, piece->band);
    const int64_t begin = std::clamp(seen.begin, first, past), end = std::clamp(seen.begin + seen.count, begin, past);
    return {column + begin - first, column + end - first};
  }
};

// Calls visit(parts, parts of the next chunk) for chunks of at most kMostKeys keys that some row sees. The keys of a
// chunk are seen by the same blocks.
template <typename T, typename Visit>
void for_each_chunk(std::span<const QueryBlock<T>> blocks, std::span<const KeyPiece<T>> pieces, Visit visit) {
  std::vector<Part<T>> previous, parts;
  int64_t columns = 0;
  const auto flush = [&] {
    if (!previous.empty()) visit(std::span<const Part<T>>(previous), std::span<const Part<T>>(parts));
    std::swap(previous, parts);
    parts.clear(), columns = 0;
  };
  for (const KeyPiece<T>& piece : pieces) {
    if (columns > 0 && !std::ranges::equal(piece.blocks, parts.front().piece->blocks)) flush();
    int64_t first = piece.positions.count, past = 0;          // what some row of a block sees
    int64_t by_all = 0, by_all_past = piece.positions.count;  // what every row of all blocks sees
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
      parts.push_back({&piece, first, first + n, columns, by_all > first || by_all_past < first + n});
      first += n, columns += n;
      if (columns == kMostKeys) flush();
    }
  }
  flush();
  flush();
}

// The number of keys of a chunk.
template <typename T>
int64_t columns_of(std::span<const Part<T>> parts) {
  return parts.back().column + parts.back().count();
}

// Fetches the rows of the next chunk of keys into the second-level cache while this one is computed, a few rows at a
// time. The rows of one head are not adjacent, and a pattern's keys may lie anywhere, so the processor does not foresee
// which rows come next.
template <typename T>
class RowsAhead {
 public:
  // `parts` are those of the next chunk, and fetch() will be called about `calls` times. With `backward` the rows of
  // the gradients are fetched as well.
  RowsAhead(std::span<const Part<T>> parts, int64_t dim, bool backward, int64_t calls)
      : parts_(parts), dim_(dim), backward_(backward), share_(parts.empty() ? 0 : ceil_div(columns_of(parts), calls)) {}

  // Fetches the next share of the rows. The processor waits for none of them.
  void fetch() {
    for (int64_t n = 0; n < share_ && part_ < parts_.size(); ++n) {
      const Part<T>& part = parts_[part_];
      fetch_row(from_row(part.piece->k, part.first + row_));
      fetch_row(from_row(part.piece->v, part.first + row_));
      if (backward_) {
        fetch_row(part.piece->dk.at(part.first + row_), sizeof(T));
        fetch_row(part.piece->dv.at(part.first + row_), sizeof(T));
      }
      if (++row_ == part.count()) row_ = 0, ++part_;
    }
  }

 private:
  void fetch_row(const StoredRows& row) { fetch_row(row.data, width_of(row.storage)); }
  void fetch_row(const void* row, int64_t width) {
    constexpr int64_t kLine = 64;
    for (int64_t i = 0; i < dim_ * width; i += kLine) __builtin_prefetch(static_cast<const char*>(row) + i, 0, 2);
  }

  std::span<const Part<T>> parts_;
  int64_t dim_;
  bool backward_;
  int64_t share_;
  size_t part_ = 0;
  int64_t row_ = 0;
};

// Sets the columns [columns, past) of panels with `length` rows to 0. They are multiplied by 0, and what an earlier
// chunk left there may not be finite.
template <typename T>
void clear_columns(T* panels, int64_t panel, int64_t length, int64_t columns, int64_t past) {
  for (int64_t c = columns; c < past; ++c) {
    T* const to = panels + c / panel * panel * length + c % panel;
    for (int64_t i = 0; i < length; ++i) to[i * panel] = 0;
  }
}

// The same for the rows [rows, past) of stacked ones (TileMath::stack), of which `rows` have been packed.
template <typename T>
void clear_rows(T* stacked, int64_t width, int64_t together, int64_t rows, int64_t past) {
  std::fill(stacked + ceil_div(rows, together) * width, stacked + ceil_div(past, together) * width, T{0});
}

// Rows of numbers of T whose elements can be read, or added to, in whole vectors where they are.
template <typename T>
bool whole_vectors(const TileMath<T>& math, int64_t dim) {
  return math.together == 1 && dim % math.lanes == 0;
}

// Rows of keys or values as the second operand of add_product: those for the columns [first, past) of a chunk.
template <typename T>
struct KeyRows {
  int64_t first, past;
  const T* data;
  int64_t step;
};

// Finds the rows of a chunk's keys or values (`rows_of`), which are read where they are if that is possible, and
// otherwise packed in `buffer`.
template <typename T>
void find_rows(const TileMath<T>& math, std::span<const Part<T>> parts, StoredRows KeyPiece<T>::*rows_of, int64_t dim,
               ScratchBuffer<T>& buffer, std::vector<KeyRows<T>>& found) {
  constexpr Storage kNumbers = std::is_same_v<T, double> ? Storage::kDouble : Storage::kFloat;
  const auto numbers = [&](const Part<T>& part) { return (part.piece->*rows_of).storage == kNumbers; };
  const int64_t columns = columns_of(parts);
  const bool long_parts = columns >= kFewestInPlace * static_cast<int64_t>(parts.size());
  found.clear();
  if (long_parts && whole_vectors(math, dim) && std::ranges::all_of(parts, numbers)) {
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

// c[r] = keep[r] * c[r] + the sum over the columns of `runs` of a[r] times the row of the column's key, for n rows r.
// If keep is null, keep[r] is 1. `width` is that of c.
template <typename T>
void add_rows(const TileMath<T>& math, int64_t n, const T* a, int64_t a_step, const std::vector<Run>& runs,
              const std::vector<KeyRows<T>>& keys, T* c, int64_t width, const T* keep) {
  for (const Run& run : runs) {
    for (const KeyRows<T>& rows : keys) {
      const int64_t first = std::max(run.first, rows.first), past = std::min(run.past, rows.past);
      if (first >= past) continue;
      math.add_product(n, a + first / math.together, a_step, 1,
                       rows.data + (first - rows.first) / math.together * rows.step, rows.step,
                       (past - first) / math.together, c, width, width, keep);
      keep = nullptr;
    }
  }
}

// The scores of n rows with the columns of `runs` (TileMath::scores), one panel at a time, between which rows of the
// next chunk are fetched: more of them at once would keep the processor waiting.
template <typename T>
void scores_of(const TileMath<T>& math, int64_t n, const T* a, int64_t a_step, const T* panels, int64_t length,
               const std::vector<Run>& runs, T* s, int64_t s_step, RowsAhead<T>& ahead) {
  for (const Run& run : runs) {
    for (int64_t c = run.first; c < run.past;) {
      const int64_t past = std::min(run.past, c / math.panel * math.panel + math.panel);
      math.scores(n, a, a_step, panels, length, {c, past}, s, s_step);
      ahead.fetch();
      c = past;
    }
  }
}

// The keys of a register tile, and where the gradients of its keys and values are added up.
template <typename T>
struct KeyTile {
  int64_t column, keys;  // the column of its first key in the chunk
  Rows<T> dk, dv;
  int64_t first = 0, past = 0;  // the rows of the block between the first and the last that see some of these keys
};

// Finds the rows that see the keys of each tile. The tiles are in the order of their columns.
template <typename T>
void find_rows_that_see(std::span<const Part<T>> parts, const Span& queries, std::vector<KeyTile<T>>& tiles) {
  size_t before = 0;  // the parts that end before the tile begins
  for (KeyTile<T>& tile : tiles) {
    const int64_t end = tile.column + tile.keys;
    while (parts[before].column + parts[before].count() <= tile.column) ++before;
    tile.first = queries.count, tile.past = 0;
    for (size_t i = before; i < parts.size() && parts[i].column < end; ++i) {
      const Part<T>& part = parts[i];
      const int64_t first = std::max(part.column, tile.column), past = std::min(part.column + part.count(), end);
      const Span keys = part.piece->positions.sub(part.first + first - part.column, past - first);
      const Band& band = part.piece->band;
      const Span rows = keys_seen(keys, queries, {-band.hi, -band.lo});  // the roles of queries and keys exchanged
      if (rows.empty()) continue;
      tile.first = std::min(tile.first, rows.begin), tile.past = std::max(tile.past, rows.begin + rows.count);
    }
  }
}

// Divides the keys of a chunk into register tiles, in the order of their columns. Returns whether their gradients are
// added up where they belong. Otherwise they are added up in scratch memory, and add_gradients adds them to those of
// the pieces.
template <typename T>
bool find_tiles(const TileMath<T>& math, std::span<const Part<T>> parts, int64_t dim, FlashScratch<T>& scratch,
                std::vector<KeyTile<T>>& tiles) {
  const auto add = [&](int64_t column, int64_t keys, Rows<T> dk, Rows<T> dv) {
    for (int64_t j = 0; j < keys; j += math.rows) {
      tiles.push_back({column + j, std::min(math.rows, keys - j), {dk.at(j), dk.step}, {dv.at(j), dv.step}});
    }
  };
  // A product writes a third, two thirds or all of the rows of a tile.
  const auto whole_tiles = [&](const Part<T>& part) { return part.count() % (math.rows / 3) == 0; };
  tiles.clear();
  if (whole_vectors(math, dim) && std::ranges::all_of(parts, whole_tiles)) {
    for (const Part<T>& part : parts) {
      const KeyPiece<T>& piece = *part.piece;
      for (int64_t j = part.first; piece.holds != nullptr && j < part.past; ++j) {
        uint8_t& holds = piece.holds[j * piece.holds_step];
        if (holds != 0) continue;
        holds = 1;
        std::fill_n(piece.dk.at(j), dim, T{0});
        std::fill_n(piece.dv.at(j), dim, T{0});
      }
      add(part.column, part.count(), {piece.dk.at(part.first), piece.dk.step},
          {piece.dv.at(part.first), piece.dv.step});
    }
    return true;
  }
  const int64_t columns = columns_of(parts), width = round_up(dim, math.lanes);
  const int64_t elements = round_up(columns, math.rows) * width;
  add(0, columns, {zeros(scratch.dk, elements), width}, {zeros(scratch.dv, elements), width});
  return false;
}

// Sets p and ds of the query rows row, ..., row + rows - 1 to 0 where they have no scores, because their columns are
// not in `runs`, and yet the products that compute a tile's dk and dv read them. p and ds point to the first of these
// rows, of which only the first `used` are written.
template <typename T>
void clear_unseen(const std::vector<KeyTile<T>>& tiles, const std::vector<Run>& runs, int64_t row, int64_t rows,
                  int64_t used, T* p, T* ds, int64_t step) {
  const auto clear = [&](int64_t first, int64_t past) {
    for (int64_t r = 0; r < used && first < past; ++r) {
      std::fill(p + r * step + first, p + r * step + past, T{0});
      std::fill(ds + r * step + first, ds + r * step + past, T{0});
    }
  };
  size_t before = 0;  // the runs that end before the tile begins
  for (const KeyTile<T>& tile : tiles) {
    if (tile.past <= row || tile.first >= row + rows) continue;
    const int64_t end = tile.column + tile.keys;
    while (before < runs.size() && runs[before].past <= tile.column) ++before;
    int64_t from = tile.column;  // has no scores from here on
    for (size_t i = before; i < runs.size() && runs[i].first < end; ++i) {
      clear(from, runs[i].first);
      from = runs[i].past;
    }
    clear(from, end);
  }
}

// Adds the gradients of a chunk that find_tiles collected in scratch memory to those of the pieces.
template <typename T>
void add_gradients(std::span<const Part<T>> parts, int64_t dim, int64_t width, T scale,
                   const FlashScratch<T>& scratch) {
  for (const Part<T>& part : parts) {
    const KeyPiece<T>& piece = *part.piece;
    for (int64_t j = 0; j < part.count(); ++j) {
      T *const to_k = piece.dk.at(part.first + j), *const to_v = piece.dv.at(part.first + j);
      const T* const from_k = scratch.dk.data() + (part.column + j) * width;
      const T* const from_v = scratch.dv.data() + (part.column + j) * width;
      uint8_t* const holds = piece.holds == nullptr ? nullptr : piece.holds + (part.first + j) * piece.holds_step;
      if (holds != nullptr && *holds == 0) {
        *holds = 1;
        for (int64_t d = 0; d < dim; ++d) to_k[d] = scale * from_k[d];
        std::copy_n(from_v, dim, to_v);
        continue;
      }
      for (int64_t d = 0; d < dim; ++d) to_k[d] += scale * from_k[d];
      for (int64_t d = 0; d < dim; ++d) to_v[d] += from_v[d];
    }
  }
}

}  // namespace annulus::cpu_flash
