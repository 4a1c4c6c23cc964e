// Flash attention for a block of query rows; see flash.h. tile_math.h has the vector code.
#include "attention/cpu_flash/flash.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

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

// Whether pairs of a row can be read as elements of 32 bits.
bool holds_pairs(const StoredRows& rows) {
  return rows.storage == Storage::kBFloat16 && rows.step % 2 == 0 && reinterpret_cast<uintptr_t>(rows.data) % 4 == 0;
}

// Returns the functions for pairs of bf16 where the processor, the dtype and the rows allow them, and otherwise those
// for numbers.
template <typename T>
const TileMath<T>& math_for(const QueryBlock<T>& block, std::span<const KeyPiece<T>> pieces, int64_t dim, T scale) {
  if constexpr (std::is_same_v<T, float>) {
    const auto of_queries = [](const QueryRows<T>& head) {
      return holds_pairs(head.q) && (head.dout.data == nullptr || holds_pairs(head.dout));
    };
    const auto of_keys = [](const KeyPiece<T>& piece) { return holds_pairs(piece.k) && holds_pairs(piece.v); };
    const TileMath<T>* const pairs = tile_math_of_pairs();
    if (pairs != nullptr && dim % 2 == 0 && scale > 0 && std::ranges::all_of(block.heads, of_queries) &&
        std::ranges::all_of(pieces, of_keys)) {
      return *pairs;
    }
  }
  return tile_math<T>();
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

// Sets the columns [columns, past) of panels with `length` rows to 0. They are multiplied by 0, and what an earlier
// chunk left there may not be finite.
template <typename T>
void clear_columns(T* panels, int64_t length, int64_t columns, int64_t past) {
  const int64_t panel = tile_math<T>().panel;
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

  // Makes the rows [n, past), which only fill up a pair of rows, add nothing to dk and dv, not even if their zeros meet
  // infinite keys.
  void clear_padding(int64_t n, int64_t past, T* p, T* ds, int64_t step) const {
    for (int64_t r = n; r < past; ++r) {
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
  const TileMath<T>& math = math_for(block, pieces, dim, scale);
  const int64_t together = math.together, length = dim / together;  // of the rows of q and k
  const T score_scale = together == 1 ? 1 : scale;                  // pairs are packed without a scale
  const auto heads = static_cast<int64_t>(block.heads.size());
  const int64_t count = block.count, rows = round_up(count, math.rows), width = round_up(dim, math.lanes);
  const int64_t q_width = round_up(length, math.lanes);
  const int64_t step = round_up(kMostKeys, math.panel);
  T* const q = room(scratch.q, heads * rows * q_width);
  T* const out = zeros(scratch.out, heads * rows * width);
  T* const maximum = room(scratch.per_row, 2 * heads * rows);
  T* const sum = maximum + heads * rows;
  T* const scores = room(scratch.scores, math.rows * step);
  T* const factors = room(scratch.factors, math.rows * step);
  std::vector<T> keep(static_cast<size_t>(math.rows));
  for (int64_t h = 0; h < heads; ++h) {
    const QueryRows<T>& head = block.heads[static_cast<size_t>(h)];
    math.copy(head.q, count, dim, scale, q + h * rows * q_width, q_width);
    for (int64_t i = 0; i < count; ++i) {
      const T lse = head.lse[i * head.lse_step];
      maximum[h * rows + i] = lse;
      sum[h * rows + i] = lse == -kInfinity<T> ? 0 : 1;
      if (lse != -kInfinity<T>) std::copy_n(head.out.at(i), dim, out + (h * rows + i) * width);
    }
    std::fill(q + (h * rows + count) * q_width, q + (h + 1) * rows * q_width, T{0});
    std::fill(maximum + h * rows + count, maximum + (h + 1) * rows, -kInfinity<T>);
    std::fill(sum + h * rows + count, sum + (h + 1) * rows, T{0});
  }
  T* const k = room(scratch.k_columns, step * length);
  T* const v = room(scratch.v, step / together * width);
  for_each_chunk(block, pieces, [&](std::span<const Part<T>> parts, int64_t columns) {
    for (const Part<T>& part : parts) {
      math.transpose(from_row(part.piece->k, part.first), part.count(), dim, k, part.column);
      math.stack(from_row(part.piece->v, part.first), part.count(), dim, v, width, part.column);
    }
    const int64_t padded = round_up(columns, math.lanes);
    clear_columns(k, length, columns, padded);
    clear_rows(v, width, together, columns, padded);
    TileRuns<T> tile(block, parts, columns);
    for (int64_t i = 0; i < rows; i += math.rows) {
      const int64_t n = std::min(math.rows, count - i);
      tile.find(i, n);
      if (tile.runs().empty()) continue;
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t row = h * rows + i;
        for (const Run& run : tile.runs()) math.scores(n, q + row * q_width, q_width, k, length, run, scores, step);
        tile.hide(i, n, scores, step);
        const auto runs = static_cast<int64_t>(tile.runs().size());
        math.softmax(n, scores, step, tile.runs().data(), runs, score_scale, maximum + row, sum + row, keep.data());
        if (block.drop_threshold > 0) {
          tile.drop(block.heads[static_cast<size_t>(h)], i, n, true, scores, factors, step);
        }
        if (math.narrow != nullptr) math.narrow(scores, step, tile.runs().data(), runs, scores, step);
        const T* factor = keep.data();
        for (const Run& run : tile.runs()) {
          const int64_t first = run.first / together;
          math.add_product(n, scores + first, step, 1, v + first * width, width, run.past / together - first,
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
  const TileMath<T>& math = math_for(block, pieces, dim, scale);
  const int64_t together = math.together, length = dim / together;  // of the rows of q, dout, k and v
  const T score_scale = together == 1 ? 1 : scale;                  // pairs are packed without a scale
  const auto heads = static_cast<int64_t>(block.heads.size());
  const int64_t count = block.count, rows = round_up(count, math.rows), width = round_up(dim, math.lanes);
  const int64_t q_width = round_up(length, math.lanes);
  const int64_t step = round_up(kMostKeys, math.panel) + round_up(math.rows, math.lanes);
  // q and dout are packed twice: for products with keys, and stacked for products with p and ds. Rows of numbers serve
  // both.
  const int64_t stacked = together == 1 ? 0 : rows / together * width;
  T* const q = zeros(scratch.q, heads * (rows * q_width + stacked));
  T* const dout = zeros(scratch.dout, heads * (rows * q_width + stacked));
  T* const q_stacked = together == 1 ? q : q + heads * rows * q_width;
  T* const dout_stacked = together == 1 ? dout : dout + heads * rows * q_width;
  T* const dq = zeros(scratch.out, heads * rows * width);
  T* const lse = room(scratch.per_row, 2 * heads * rows);
  T* const delta = lse + heads * rows;
  for (int64_t h = 0; h < heads; ++h) {
    const QueryRows<T>& head = block.heads[static_cast<size_t>(h)];
    math.copy(head.q, count, dim, scale, q + h * rows * q_width, q_width);
    math.copy(head.dout, count, dim, 1, dout + h * rows * q_width, q_width);
    if (together > 1) {
      math.stack(head.q, count, dim, q_stacked + h * stacked, width, 0);
      math.stack(head.dout, count, dim, dout_stacked + h * stacked, width, 0);
    }
    for (int64_t i = 0; i < rows; ++i) {
      lse[h * rows + i] = i < count ? head.lse[i * head.lse_step] : kInfinity<T>;
      delta[h * rows + i] = i < count ? head.delta[i * head.delta_step] : 0;
    }
  }
  T* const p = room(scratch.scores, kRowsHeld * step);
  T* const ds = room(scratch.gradients, kRowsHeld * step);
  T* const factors = room(scratch.factors, math.rows * step);
  T* const narrowed = room(scratch.narrowed, math.narrow == nullptr ? 0 : math.rows * step);
  T* const k = room(scratch.k, step / together * width);
  T* const k_columns = room(scratch.k_columns, step * length);
  T* const v_columns = room(scratch.v_columns, step * length);
  std::vector<Seen> seen;
  for_each_chunk(block, pieces, [&](std::span<const Part<T>> parts, int64_t columns) {
    const int64_t tiles = ceil_div(columns, math.rows);
    T* const dk = zeros(scratch.dk, tiles * math.rows * width);
    T* const dv = zeros(scratch.dv, tiles * math.rows * width);
    for (const Part<T>& part : parts) {
      const StoredRows keys = from_row(part.piece->k, part.first);
      math.stack(keys, part.count(), dim, k, width, part.column);
      math.transpose(keys, part.count(), dim, k_columns, part.column);
      math.transpose(from_row(part.piece->v, part.first), part.count(), dim, v_columns, part.column);
    }
    const int64_t padded = round_up(columns, math.lanes);
    clear_rows(k, width, together, columns, padded);
    clear_columns(k_columns, length, columns, padded);
    clear_columns(v_columns, length, columns, padded);
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
            math.scores(n, q + row * q_width, q_width, k_columns, length, run, p_rows, step);
            math.scores(n, dout + row * q_width, q_width, v_columns, length, run, ds_rows, step);
          }
          tile.hide(i, n, p_rows, step);
          const QueryRows<T>& head = block.heads[static_cast<size_t>(h)];
          const bool drops = block.drop_threshold > 0;
          if (drops) tile.drop(head, i, n, true, ds_rows, factors, step);
          const auto runs = static_cast<int64_t>(tile.runs().size());
          math.gradient(n, p_rows, ds_rows, step, tile.runs().data(), runs, score_scale, lse + row, delta + row);
          if (drops) tile.drop(head, i, n, false, p_rows, factors, step);  // dv needs the dropped p
          const int64_t summed = round_up(n, together);
          tile.clear_padding(n, summed, p_rows, ds_rows, step);
          tile.clear_rest(summed, p_rows, ds_rows, step);
          const T* ds_operand = ds_rows;
          if (math.narrow != nullptr) {
            math.narrow(ds_rows, step, tile.runs().data(), runs, narrowed, step);
            ds_operand = narrowed;
            math.zip(p_rows, step, padded);
            math.zip(ds_rows, step, padded);
          }
          for (const Run& run : tile.runs()) {
            const int64_t first = run.first / together;
            math.add_product(n, ds_operand + first, step, 1, k + first * width, width, run.past / together - first,
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
          const int64_t keys = std::min(math.rows, columns - t * math.rows);
          const int64_t from = first * step + t * math.rows, to = t * math.rows * width;
          const int64_t row = (h * rows + held + first) / together * width;
          const int64_t n = ceil_div(std::min(last, count - held) - first, together);
          const int64_t next = together * step;  // two rows of pairs are as far apart
          math.add_product(keys, p + from, 1, next, dout_stacked + row, width, n, dv + to, width, width, nullptr);
          math.add_product(keys, ds + from, 1, next, q_stacked + row, width, n, dk + to, width, width, nullptr);
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
          for (int64_t d = 0; d < dim; ++d) to_k[d] = score_scale * from_k[d];
          std::copy_n(from_v, dim, to_v);
          continue;
        }
        for (int64_t d = 0; d < dim; ++d) to_k[d] += score_scale * from_k[d];
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
