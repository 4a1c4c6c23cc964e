// Flash attention for a block of query rows; see flash.h. tile_math.h has the vector code.
#include "attention/cpu_flash/flash.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/tiles/draws.h"
#include "attention/tiles/tile_groups.h"

namespace annulus {
namespace {

template <typename T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();

int64_t round_up(int64_t n, int64_t unit) { return ceil_div(n, unit) * unit; }

StoredRows from_row(StoredRows rows, int64_t row) {
  const int64_t width = rows.storage == Storage::kDouble ? 8 : rows.storage == Storage::kFloat ? 4 : 2;
  rows.data = static_cast<const char*>(rows.data) + row * rows.step * width;
  return rows;
}

template <typename T>
T* room(std::vector<T>& buffer, int64_t elements) {
  if (static_cast<int64_t>(buffer.size()) < elements) buffer.resize(static_cast<size_t>(elements));
  return buffer.data();
}

template <typename T>
T* zeros(std::vector<T>& buffer, int64_t elements) {
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

// Calls visit(parts, number of keys) for chunks of at most kMostKeys of the keys that some row of the block sees.
template <typename T, typename Visit>
void for_each_chunk(const QueryBlock<T>& block, std::span<const KeyPiece<T>> pieces, Visit visit) {
  std::vector<Part<T>> parts;
  int64_t columns = 0;
  const auto flush = [&] {
    if (columns > 0) visit(std::span<const Part<T>>(parts), columns);
    parts.clear(), columns = 0;
  };
  for (const KeyPiece<T>& piece : pieces) {
    const Span seen = keys_seen(block.positions, piece.positions, piece.band);
    const Span by_first = keys_seen(block.positions.sub(0, 1), piece.positions, piece.band);
    const Span by_last = keys_seen(block.positions.sub(block.count - 1, 1), piece.positions, piece.band);
    int64_t first = seen.begin;
    const int64_t past = seen.begin + seen.count, by_all = by_first.begin + by_first.count;
    while (first < past) {
      const int64_t n = std::min(past - first, kMostKeys - columns);
      parts.push_back({&piece, first, first + n, columns, by_last.begin > first || by_all < first + n});
      first += n, columns += n;
      if (columns == kMostKeys) flush();
    }
  }
  flush();
}

// Sets the columns [columns, past) of panels to 0. They are multiplied by 0, and what an earlier chunk left there may
// not be finite.
template <typename T>
void clear_columns(T* panels, int64_t dim, int64_t columns, int64_t past) {
  const int64_t panel = tile_math<T>().panel;
  for (int64_t c = columns; c < past; ++c) {
    T* const to = panels + c / panel * panel * dim + c % panel;
    for (int64_t i = 0; i < dim; ++i) to[i * panel] = 0;
  }
}

// Says which scores of a register tile's rows with a chunk are computed: runs of columns that some of the rows see,
// rounded to whole vectors, so that the cost of a tile follows its pairs. Pairs within the runs that a band hides get
// the score -inf.
template <typename T>
class TileRuns {
 public:
  TileRuns(const QueryBlock<T>& block, std::span<const Part<T>> parts, int64_t columns)
      : block_(block), parts_(parts), columns_(columns), all_(round_up(columns, tile_math<T>().lanes)) {
    cut_ = columns != all_;
    for (const Part<T>& part : parts) cut_ = cut_ || part.cut;
  }

  // Finds the runs for rows row, ..., row + n - 1 of the block.
  void find(int64_t row, int64_t n) {
    runs_.clear();
    const int64_t lanes = tile_math<T>().lanes;
    const Span queries = block_.positions.sub(row, n);
    for (const Part<T>& part : parts_) {
      const Run seen = part.cut ? part.seen_by(queries) : Run{part.column, part.column + part.count()};
      if (seen.first == seen.past) continue;
      const Run run{seen.first / lanes * lanes, round_up(seen.past, lanes)};
      if (!runs_.empty() && run.first <= runs_.back().past) {
        runs_.back().past = std::max(runs_.back().past, run.past);
      } else {
        runs_.push_back(run);
      }
    }
  }
  const std::vector<Run>& runs() const { return runs_; }

  // Sets the scores of those pairs in the runs to -inf that rows row, ..., row + n - 1 do not see.
  void hide(int64_t row, int64_t n, T* scores, int64_t step) const {
    if (!cut_) return;
    for (int64_t r = 0; r < n; ++r) {
      T* const line = scores + r * step;
      const Span query = block_.positions.sub(row + r, 1);
      for (const Run& run : runs_) {
        int64_t from = run.first;  // hidden from here on
        for (const Part<T>& part : parts_) {
          if (part.column >= run.past || part.column + part.count() <= run.first) continue;
          const Run seen = part.cut ? part.seen_by(query) : Run{part.column, part.column + part.count()};
          if (seen.first == seen.past) continue;
          const int64_t first = std::clamp(seen.first, run.first, run.past);
          if (from < first) std::fill(line + from, line + first, -kInfinity<T>);
          from = std::clamp(seen.past, run.first, run.past);
        }
        std::fill(line + from, line + run.past, -kInfinity<T>);
      }
    }
  }

  // Multiplies the scores of rows row, ..., row + n - 1 by the dropout factor of each pair. If `draw`, the factors are
  // drawn and stored in `factors`; otherwise they are read from there.
  void drop(const QueryRows<T>& head, int64_t row, int64_t n, bool draw, T* scores, T* factors, int64_t step) const {
    for (const Run& run : runs_) {
      for (int64_t r = 0; r < n; ++r) {
        T *const line = scores + r * step, *const of_pair = factors + r * step;
        for (const Part<T>& part : parts_) {
          const int64_t first = std::max(run.first, part.column), past = std::min(run.past, part.column + part.count());
          if (first >= past) continue;
          if (draw) {
            const Span keys = part.piece->positions.sub(part.first + first - part.column, past - first);
            draw_row(head.philox_key, block_.positions.at(row + r), keys, block_.drop_threshold, block_.kept,
                     of_pair + first);
          }
          for (int64_t c = first; c < past; ++c) line[c] *= of_pair[c];
        }
      }
    }
  }

  // Makes rows that only fill up the tile add nothing to dk and dv, not even if their zeros meet infinite keys.
  void clear_padding(int64_t n, T* p, T* ds, int64_t step) const {
    for (int64_t r = n; r < tile_math<T>().rows; ++r) {
      for (const Run& run : runs_) {
        std::fill(p + r * step + run.first, p + r * step + run.past, T{0});
        std::fill(ds + r * step + run.first, ds + r * step + run.past, T{0});
      }
    }
  }

  // Sets p and its gradient to 0 outside of the runs, where the products over several register tiles read them.
  void clear_rest(int64_t n, T* p, T* ds, int64_t step) const {
    if (runs_.size() == 1 && runs_[0].first == 0 && runs_[0].past == all_) return;
    for (int64_t r = 0; r < n; ++r) {
      int64_t from = 0;
      const auto clear = [&](int64_t past) {
        std::fill(p + r * step + from, p + r * step + past, T{0});
        std::fill(ds + r * step + from, ds + r * step + past, T{0});
      };
      for (const Run& run : runs_) {
        clear(run.first);
        from = run.past;
      }
      clear(all_);
    }
  }

 private:
  const QueryBlock<T>& block_;
  std::span<const Part<T>> parts_;
  int64_t columns_, all_;
  bool cut_;
  std::vector<Run> runs_;
};

}  // namespace

template <typename T>
void flash_forward(const QueryBlock<T>& block, std::span<const KeyPiece<T>> pieces, int64_t dim, T scale,
                   FlashScratch<T>& scratch) {
  const TileMath<T>& math = tile_math<T>();
  const auto heads = static_cast<int64_t>(block.heads.size());
  const int64_t count = block.count, rows = round_up(count, math.rows), width = round_up(dim, math.lanes);
  const int64_t step = round_up(kMostKeys, math.panel);
  T* const q = room(scratch.q, heads * rows * width);
  T* const out = zeros(scratch.out, heads * rows * width);
  T* const maximum = room(scratch.per_row, 2 * heads * rows);
  T* const sum = maximum + heads * rows;
  T* const scores = room(scratch.scores, math.rows * step);
  T* const factors = room(scratch.factors, math.rows * step);
  std::vector<T> keep(static_cast<size_t>(math.rows));
  for (int64_t h = 0; h < heads; ++h) {
    const QueryRows<T>& head = block.heads[static_cast<size_t>(h)];
    math.copy(head.q, count, dim, scale, q + h * rows * width, width);
    for (int64_t i = 0; i < count; ++i) {
      const T lse = head.lse[i * head.lse_step];
      maximum[h * rows + i] = lse;
      sum[h * rows + i] = lse == -kInfinity<T> ? 0 : 1;
      if (lse != -kInfinity<T>) std::copy_n(head.out.at(i), dim, out + (h * rows + i) * width);
    }
    std::fill(q + (h * rows + count) * width, q + (h + 1) * rows * width, T{0});
    std::fill(maximum + h * rows + count, maximum + (h + 1) * rows, -kInfinity<T>);
    std::fill(sum + h * rows + count, sum + (h + 1) * rows, T{0});
  }
  T* const k = room(scratch.k_columns, step * dim);
  T* const v = room(scratch.v, step * width);
  for_each_chunk(block, pieces, [&](std::span<const Part<T>> parts, int64_t columns) {
    for (const Part<T>& part : parts) {
      math.transpose(from_row(part.piece->k, part.first), part.count(), dim, k, part.column);
      math.copy(from_row(part.piece->v, part.first), part.count(), dim, 1, v + part.column * width, width);
    }
    const int64_t padded = round_up(columns, math.lanes);
    clear_columns(k, dim, columns, padded);
    std::fill(v + columns * width, v + padded * width, T{0});
    TileRuns<T> tile(block, parts, columns);
    for (int64_t i = 0; i < rows; i += math.rows) {
      const int64_t n = std::min(math.rows, count - i);
      tile.find(i, n);
      if (tile.runs().empty()) continue;
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t row = h * rows + i;
        for (const Run& run : tile.runs()) math.scores(q + row * width, width, k, dim, run, scores, step);
        tile.hide(i, n, scores, step);
        math.softmax(scores, step, tile.runs().data(), static_cast<int64_t>(tile.runs().size()), maximum + row,
                     sum + row, keep.data());
        if (block.drop_threshold > 0) {
          tile.drop(block.heads[static_cast<size_t>(h)], i, n, true, scores, factors, step);
        }
        const T* factor = keep.data();
        for (const Run& run : tile.runs()) {
          math.add_product(scores + run.first, step, 1, v + run.first * width, width, run.past - run.first,
                           out + row * width, width, width, factor);
          factor = nullptr;
        }
      }
    }
  });
  for (int64_t h = 0; h < heads; ++h) {
    const QueryRows<T>& head = block.heads[static_cast<size_t>(h)];
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = h * rows + i;
      if (sum[row] == 0) continue;  // the row has seen no key so far
      head.lse[i * head.lse_step] = maximum[row] + std::log(sum[row]);
      const T share = 1 / sum[row];
      for (int64_t d = 0; d < dim; ++d) head.out.at(i)[d] = out[row * width + d] * share;
    }
  }
}

namespace {

// Of the query rows whose scores are held, the range of those whose register tiles see some key of one register tile of
// keys.
struct Seen {
  int64_t first = kRowsHeld, past = 0;
};

}  // namespace

template <typename T>
void flash_backward(const QueryBlock<T>& block, std::span<const KeyPiece<T>> pieces, int64_t dim, T scale,
                    FlashScratch<T>& scratch) {
  const TileMath<T>& math = tile_math<T>();
  const auto heads = static_cast<int64_t>(block.heads.size());
  const int64_t count = block.count, rows = round_up(count, math.rows), width = round_up(dim, math.lanes);
  const int64_t step = round_up(kMostKeys, math.panel) + round_up(math.rows, math.lanes);
  T* const q = zeros(scratch.q, heads * rows * width);
  T* const dout = zeros(scratch.dout, heads * rows * width);
  T* const dq = zeros(scratch.out, heads * rows * width);
  T* const lse = room(scratch.per_row, 2 * heads * rows);
  T* const delta = lse + heads * rows;
  for (int64_t h = 0; h < heads; ++h) {
    const QueryRows<T>& head = block.heads[static_cast<size_t>(h)];
    math.copy(head.q, count, dim, scale, q + h * rows * width, width);
    math.copy(head.dout, count, dim, 1, dout + h * rows * width, width);
    for (int64_t i = 0; i < rows; ++i) {
      lse[h * rows + i] = i < count ? head.lse[i * head.lse_step] : kInfinity<T>;
      delta[h * rows + i] = i < count ? head.delta[i * head.delta_step] : 0;
    }
  }
  T* const p = room(scratch.scores, kRowsHeld * step);
  T* const ds = room(scratch.gradients, kRowsHeld * step);
  T* const factors = room(scratch.factors, math.rows * step);
  T* const k = room(scratch.k, step * width);
  T* const k_columns = room(scratch.k_columns, step * dim);
  T* const v_columns = room(scratch.v_columns, step * dim);
  std::vector<Seen> seen;
  for_each_chunk(block, pieces, [&](std::span<const Part<T>> parts, int64_t columns) {
    const int64_t tiles = ceil_div(columns, math.rows);
    T* const dk = zeros(scratch.dk, tiles * math.rows * width);
    T* const dv = zeros(scratch.dv, tiles * math.rows * width);
    for (const Part<T>& part : parts) {
      const StoredRows keys = from_row(part.piece->k, part.first);
      math.copy(keys, part.count(), dim, 1, k + part.column * width, width);
      math.transpose(keys, part.count(), dim, k_columns, part.column);
      math.transpose(from_row(part.piece->v, part.first), part.count(), dim, v_columns, part.column);
    }
    const int64_t padded = round_up(columns, math.lanes);
    std::fill(k + columns * width, k + padded * width, T{0});
    clear_columns(k_columns, dim, columns, padded);
    clear_columns(v_columns, dim, columns, padded);
    TileRuns<T> tile(block, parts, columns);
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t held = 0; held < rows; held += kRowsHeld) {
        const int64_t past = std::min(rows, held + kRowsHeld);
        seen.assign(static_cast<size_t>(tiles), {});
        for (int64_t i = held; i < past; i += math.rows) {
          const int64_t n = std::min(math.rows, count - i), row = h * rows + i;
          T *const p_rows = p + (i - held) * step, *const ds_rows = ds + (i - held) * step;
          tile.find(i, n);
          for (const Run& run : tile.runs()) {
            math.scores(q + row * width, width, k_columns, dim, run, p_rows, step);
            math.scores(dout + row * width, width, v_columns, dim, run, ds_rows, step);
          }
          tile.hide(i, n, p_rows, step);
          const QueryRows<T>& head = block.heads[static_cast<size_t>(h)];
          const bool drops = block.drop_threshold > 0;
          if (drops) tile.drop(head, i, n, true, ds_rows, factors, step);
          math.gradient(p_rows, ds_rows, step, tile.runs().data(), static_cast<int64_t>(tile.runs().size()), lse + row,
                        delta + row);
          if (drops) tile.drop(head, i, n, false, p_rows, factors, step);  // dv needs the dropped p
          tile.clear_padding(n, p_rows, ds_rows, step);
          tile.clear_rest(math.rows, p_rows, ds_rows, step);
          for (const Run& run : tile.runs()) {
            math.add_product(ds_rows + run.first, step, 1, k + run.first * width, width, run.past - run.first,
                             dq + row * width, width, width, nullptr);
            for (int64_t t = run.first / math.rows; t < std::min(tiles, ceil_div(run.past, math.rows)); ++t) {
              Seen& rows_seeing = seen[static_cast<size_t>(t)];
              rows_seeing = {std::min(rows_seeing.first, i - held), std::max(rows_seeing.past, i - held + math.rows)};
            }
          }
        }
        for (int64_t t = 0; t < tiles; ++t) {
          const auto [first, last] = seen[static_cast<size_t>(t)];
          if (first >= last) continue;
          const int64_t from = first * step + t * math.rows, to = t * math.rows * width;
          const int64_t row = (h * rows + held + first) * width;
          math.add_product(p + from, 1, step, dout + row, width, last - first, dv + to, width, width, nullptr);
          math.add_product(ds + from, 1, step, q + row, width, last - first, dk + to, width, width, nullptr);
        }
      }
    }
    for (const Part<T>& part : parts) {
      for (int64_t j = 0; j < part.count(); ++j) {
        const KeyPiece<T>& piece = *part.piece;
        T *const to_k = piece.dk.at(part.first + j), *const to_v = piece.dv.at(part.first + j);
        const T *const from_k = dk + (part.column + j) * width, *const from_v = dv + (part.column + j) * width;
        uint8_t* const holds = piece.holds == nullptr ? nullptr : piece.holds + (part.first + j) * piece.holds_step;
        if (holds != nullptr && *holds == 0) {
          *holds = 1;
          std::copy_n(from_k, dim, to_k);
          std::copy_n(from_v, dim, to_v);
          continue;
        }
        for (int64_t d = 0; d < dim; ++d) to_k[d] += from_k[d];
        for (int64_t d = 0; d < dim; ++d) to_v[d] += from_v[d];
      }
    }
  });
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t i = 0; i < count; ++i) {
      T* const to = block.heads[static_cast<size_t>(h)].dq.at(i);
      const T* const from = dq + (h * rows + i) * width;
      for (int64_t d = 0; d < dim; ++d) to[d] += scale * from[d];
    }
  }
}

template void flash_forward(const QueryBlock<float>&, std::span<const KeyPiece<float>>, int64_t, float,
                            FlashScratch<float>&);
template void flash_forward(const QueryBlock<double>&, std::span<const KeyPiece<double>>, int64_t, double,
                            FlashScratch<double>&);
template void flash_backward(const QueryBlock<float>&, std::span<const KeyPiece<float>>, int64_t, float,
                             FlashScratch<float>&);
template void flash_backward(const QueryBlock<double>&, std::span<const KeyPiece<double>>, int64_t, double,
                             FlashScratch<double>&);

}  // namespace annulus
