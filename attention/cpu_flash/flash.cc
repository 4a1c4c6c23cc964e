// Flash attention for a block of query rows; see flash.h. tile_math.h has the vector code.
#include "attention/cpu_flash/flash.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "attention/cpu_flash/key_chunks.h"
#include "attention/cpu_flash/tile_runs.h"

namespace annulus {

using namespace cpu_flash;

namespace {

template <typename T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();

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

// A thread's products are made while this exists.
template <typename T>
class Products {
 public:
  explicit Products(const TileMath<T>& math) : end_(math.end) {
    if (math.begin != nullptr) math.begin();
  }
  ~Products() {
    if (end_ != nullptr) end_();
  }
  Products(const Products&) = delete;
  Products& operator=(const Products&) = delete;

 private:
  void (*end_)();
};

// Packs `count` rows for products with keys, followed by zeros up to row `rows`.
template <typename T>
void pack_queries(const TileMath<T>& math, const StoredRows& x, int64_t count, int64_t rows, int64_t dim, T scale,
                  T* to, int64_t to_step) {
  math.copy(x, count, dim, scale, to, to_step);
  std::fill(to + count * to_step, to + rows * to_step, T{0});
}

}  // namespace

template <typename T>
void flash_forward(const QueryBlock<T>& block, std::span<const KeyPiece<T>> pieces, int64_t dim, T scale,
                   FlashScratch<T>& scratch) {
  const TileMath<T>& math = math_for(block, pieces, dim, scale);
  const int64_t together = math.together, length = round_up(dim / together, math.depth);  // of the rows of q and k
  const T score_scale = together == 1 ? 1 : scale;  // pairs are packed without a scale
  const auto heads = static_cast<int64_t>(block.heads.size());
  const int64_t count = block.count, rows = round_up(count, math.rows), width = round_up(dim, math.lanes);
  const int64_t q_width = round_up(length, math.lanes);
  const int64_t step = round_up(kMostKeys, math.panel) + kRowGap;
  T* const q = room(scratch.q, heads * rows * q_width);
  T* const out = zeros(scratch.out, heads * rows * width);
  T* const maximum = room(scratch.per_row, 2 * heads * rows);
  T* const sum = maximum + heads * rows;
  T* const scores = room(scratch.scores, math.rows * step);
  const bool drops = block.drop_threshold > 0;
  T* const factors = room(scratch.factors, drops ? math.rows * step : 0);  // zeros at first, and always finite
  std::vector<T> keep(static_cast<size_t>(math.rows));
  for (int64_t h = 0; h < heads; ++h) {
    const QueryRows<T>& head = block.heads[static_cast<size_t>(h)];
    pack_queries(math, head.q, count, rows, dim, scale, q + h * rows * q_width, q_width);
    for (int64_t i = 0; i < count; ++i) {
      const T lse = head.lse[i * head.lse_step];
      maximum[h * rows + i] = lse;
      sum[h * rows + i] = lse == -kInfinity<T> ? 0 : 1;
      if (lse != -kInfinity<T>) std::copy_n(head.out.at(i), dim, out + (h * rows + i) * width);
    }
    std::fill(maximum + h * rows + count, maximum + (h + 1) * rows, -kInfinity<T>);
    std::fill(sum + h * rows + count, sum + (h + 1) * rows, T{0});
  }
  T* const k = room(scratch.k_columns, step * length);
  std::vector<KeyRows<T>> values;
  const Products<T> products(math);
  for_each_chunk(block, pieces, [&](std::span<const Part<T>> parts, std::span<const Part<T>> next) {
    const int64_t columns = columns_of(parts);
    const int64_t padded = round_up(columns, math.lanes);
    for (const Part<T>& part : parts) {
      math.transpose(from_row(part.piece->k, part.first), part.count(), dim, k, part.column);
    }
    clear_columns(k, math.panel, length, columns, padded);
    find_rows(math, parts, &KeyPiece<T>::v, dim, scratch.v, values);
    TileRuns<T> tile(math, block, parts, columns);
    RowsAhead<T> ahead(next, dim, false, heads * ceil_div(columns, math.panel) * rows / math.rows);
    for (int64_t i = 0; i < rows; i += math.rows) {
      const int64_t n = std::min(math.rows, count - i);
      tile.find(i, n);
      if (tile.runs().empty()) continue;
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t row = h * rows + i;
        scores_of(math, n, q + row * q_width, q_width, k, length, tile.runs(), scores, step, ahead);
        tile.hide(i, n, scores, step);
        const auto runs = static_cast<int64_t>(tile.runs().size());
        if (drops) tile.draw(block.heads[static_cast<size_t>(h)].philox_key, i, n, factors, step);
        math.softmax(n, scores, step, tile.runs().data(), runs, score_scale, drops ? factors : nullptr, maximum + row,
                     sum + row, keep.data());
        if (math.narrow != nullptr) math.narrow(n, scores, step, tile.runs().data(), runs, scores, step);
        add_rows(math, n, scores, step, tile.runs(), values, out + row * width, width, keep.data());
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

template <typename T>
void flash_backward(const QueryBlock<T>& block, std::span<const KeyPiece<T>> pieces, int64_t dim, T scale,
                    FlashScratch<T>& scratch) {
  const TileMath<T>& math = math_for(block, pieces, dim, scale);
  const int64_t together = math.together,
                length = round_up(dim / together, math.depth);  // of the rows of q, dout, k and v
  const T score_scale = together == 1 ? 1 : scale;              // pairs are packed without a scale
  const auto heads = static_cast<int64_t>(block.heads.size());
  const int64_t count = block.count, rows = round_up(count, math.rows), width = round_up(dim, math.lanes);
  const int64_t q_width = round_up(length, math.lanes);
  const int64_t step = round_up(kMostKeys, math.panel) + round_up(math.rows, math.lanes);
  // q and dout are packed twice: for products with keys, and stacked for products with p and ds. Rows of numbers serve
  // both.
  const int64_t stacked_width = together == 1 ? width : width + kRowGap;
  const int64_t stacked = together == 1 ? 0 : rows / together * stacked_width;
  T* const q = room(scratch.q, heads * (rows * q_width + stacked));
  T* const dout = room(scratch.dout, heads * (rows * q_width + stacked));
  const int64_t unit = together * math.depth;  // the rows that a product adds up are a multiple of it
  T* const q_stacked = together == 1 ? q : q + heads * rows * q_width;
  T* const dout_stacked = together == 1 ? dout : dout + heads * rows * q_width;
  T* const dq = zeros(scratch.out, heads * rows * width);
  T* const lse = room(scratch.per_row, 2 * heads * rows);
  T* const delta = lse + heads * rows;
  for (int64_t h = 0; h < heads; ++h) {
    const QueryRows<T>& head = block.heads[static_cast<size_t>(h)];
    pack_queries(math, head.q, count, rows, dim, scale, q + h * rows * q_width, q_width);
    pack_queries(math, head.dout, count, rows, dim, T{1}, dout + h * rows * q_width, q_width);
    if (together > 1) {
      math.stack(head.q, count, dim, q_stacked + h * stacked, stacked_width, 0);
      math.stack(head.dout, count, dim, dout_stacked + h * stacked, stacked_width, 0);
      clear_rows(q_stacked + h * stacked, stacked_width, together, count, rows);
      clear_rows(dout_stacked + h * stacked, stacked_width, together, count, rows);
    }
    for (int64_t i = 0; i < rows; ++i) {
      lse[h * rows + i] = i < count ? head.lse[i * head.lse_step] : kInfinity<T>;
      delta[h * rows + i] = i < count ? head.delta[i * head.delta_step] : 0;
    }
  }
  T* const p = room(scratch.scores, math.held * step);
  T* const ds = room(scratch.gradients, math.held * step);
  const bool drops = block.drop_threshold > 0;
  T* const factors = room(scratch.factors, drops ? math.rows * step : 0);  // zeros at first, and always finite
  T* const narrowed = room(scratch.narrowed, math.narrow == nullptr ? 0 : math.rows * step);
  T* const k_columns = room(scratch.k_columns, step * length);
  T* const v_columns = room(scratch.v_columns, step * length);
  std::vector<KeyRows<T>> keys;
  std::vector<KeyTile<T>> tiles;
  const Products<T> products(math);
  for_each_chunk(block, pieces, [&](std::span<const Part<T>> parts, std::span<const Part<T>> next) {
    const int64_t columns = columns_of(parts);
    const int64_t padded = round_up(columns, math.lanes);
    for (const Part<T>& part : parts) {
      math.transpose(from_row(part.piece->k, part.first), part.count(), dim, k_columns, part.column);
      math.transpose(from_row(part.piece->v, part.first), part.count(), dim, v_columns, part.column);
    }
    clear_columns(k_columns, math.panel, length, columns, padded);
    clear_columns(v_columns, math.panel, length, columns, padded);
    find_rows(math, parts, &KeyPiece<T>::k, dim, scratch.k, keys);
    const bool in_place = find_tiles(math, parts, dim, scratch, tiles);
    find_rows_that_see(parts, block.positions, tiles);
    TileRuns<T> tile(math, block, parts, columns);
    RowsAhead<T> ahead(next, dim, true, heads * 2 * ceil_div(columns, math.panel) * rows / math.rows);
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t held = 0; held < rows; held += math.held) {
        const int64_t past = std::min(rows, held + math.held);
        for (int64_t i = held; i < past; i += math.rows) {
          const int64_t n = std::min(math.rows, count - i), row = h * rows + i;
          T *const p_rows = p + (i - held) * step, *const ds_rows = ds + (i - held) * step;
          const int64_t summed = round_up(n, unit);
          tile.find(i, n);
          clear_unseen(tiles, tile.runs(), i, math.rows, summed, p_rows, ds_rows, step);
          if (tile.runs().empty()) continue;
          scores_of(math, n, q + row * q_width, q_width, k_columns, length, tile.runs(), p_rows, step, ahead);
          scores_of(math, n, dout + row * q_width, q_width, v_columns, length, tile.runs(), ds_rows, step, ahead);
          tile.hide(i, n, p_rows, step);
          if (drops) tile.draw(block.heads[static_cast<size_t>(h)].philox_key, i, n, factors, step);
          const auto runs = static_cast<int64_t>(tile.runs().size());
          math.gradient(n, p_rows, ds_rows, step, tile.runs().data(), runs, score_scale, drops ? factors : nullptr,
                        lse + row, delta + row);
          tile.clear_padding(n, summed, p_rows, ds_rows, step);
          const T* ds_operand = ds_rows;
          if (math.narrow != nullptr) {
            math.narrow(n, ds_rows, step, tile.runs().data(), runs, narrowed, step);
            ds_operand = narrowed;
            math.zip(summed, p_rows, step, padded);
            math.zip(summed, ds_rows, step, padded);
          }
          add_rows(math, n, ds_operand, step, tile.runs(), keys, dq + row * width, width,
                   static_cast<const T*>(nullptr));
        }
        for (const KeyTile<T>& of_keys : tiles) {
          const int64_t first = std::max(of_keys.first, held) / unit * unit;
          const int64_t n = ceil_div(std::min(of_keys.past, past) - first, unit) * math.depth;
          if (n <= 0) continue;
          const int64_t from = (first - held) * step + of_keys.column;
          const int64_t row = (h * rows + first) / together * stacked_width;
          const int64_t next = together * step;  // two rows of pairs are as far apart
          math.add_product(of_keys.keys, p + from, 1, next, dout_stacked + row, stacked_width, n, of_keys.dv.data,
                           of_keys.dv.step, width, nullptr);
          math.add_product(of_keys.keys, ds + from, 1, next, q_stacked + row, stacked_width, n, of_keys.dk.data,
                           of_keys.dk.step, width, nullptr);
        }
      }
    }
    if (!in_place) add_gradients(parts, dim, width, score_scale, scratch);
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
