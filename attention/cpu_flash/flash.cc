// Flash attention for blocks of query rows; see flash.h. tile_math.h has the vector code.
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
const TileMath<T>& math_for(std::span<const QueryBlock<T>> blocks, std::span<const KeyPiece<T>> pieces, int64_t dim,
                            T scale) {
  if constexpr (std::is_same_v<T, float>) {
    const auto of_queries = [](const QueryRows<T>& head) {
      return holds_pairs(head.q) && (head.dout.data == nullptr || holds_pairs(head.dout));
    };
    const auto of_block = [&](const QueryBlock<T>& block) { return std::ranges::all_of(block.heads, of_queries); };
    const auto of_keys = [](const KeyPiece<T>& piece) { return holds_pairs(piece.k) && holds_pairs(piece.v); };
    const TileMath<T>* const pairs = tile_math_of_pairs();
    if (pairs != nullptr && dim % 2 == 0 && scale > 0 && std::ranges::all_of(blocks, of_block) &&
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

// Where the query rows of a block lie in scratch memory: `rows` for each head, of which the first block->count are in
// use.
template <typename T>
struct Placed {
  const QueryBlock<T>* block;
  int64_t first, rows;

  int64_t row(int64_t head, int64_t i) const { return first + head * rows + i; }
  int64_t past() const { return row(static_cast<int64_t>(block->heads.size()), 0); }
};

template <typename T>
std::vector<Placed<T>> place(std::span<const QueryBlock<T>> blocks, int64_t unit) {
  std::vector<Placed<T>> placed;
  for (const QueryBlock<T>& block : blocks) {
    placed.push_back({&block, placed.empty() ? 0 : placed.back().past(), round_up(block.count, unit)});
  }
  return placed;
}

// Calls visit(placed block, head, its index) for the heads of all blocks.
template <typename T, typename Visit>
void for_each_head(const std::vector<Placed<T>>& placed, Visit visit) {
  for (const Placed<T>& at : placed) {
    for (size_t h = 0; h < at.block->heads.size(); ++h) visit(at, at.block->heads[h], static_cast<int64_t>(h));
  }
}

// The tiles of registers that the rows of the chunk's blocks make.
template <typename T>
int64_t tiles_of(const std::vector<Placed<T>>& placed, std::span<const Part<T>> parts, int64_t unit) {
  int64_t rows = 0;
  for (const int b : parts[0].piece->blocks) {
    const Placed<T>& at = placed[static_cast<size_t>(b)];
    rows += at.past() - at.first;
  }
  return rows / unit;
}

}  // namespace

template <typename T>
void flash_forward(std::span<const QueryBlock<T>> blocks, std::span<const KeyPiece<T>> pieces, int64_t dim, T scale,
                   FlashScratch<T>& scratch, const FlashDone& done) {
  const TileMath<T>& math = math_for(blocks, pieces, dim, scale);
  const int64_t together = math.together, length = round_up(dim / together, math.depth);  // of the rows of q and k
  const T score_scale = together == 1 ? 1 : scale;  // pairs are packed without a scale
  const std::vector<Placed<T>> placed = place(blocks, math.rows);
  const int64_t all_rows = placed.back().past(), width = round_up(dim, math.lanes);
  const int64_t q_width = round_up(length, math.lanes);
  const int64_t step = round_up(kMostKeys, math.panel) + kRowGap;
  T* const q = room(scratch.q, all_rows * q_width);
  T* const out = zeros(scratch.out, all_rows * width);
  T* const maximum = room(scratch.per_row, 2 * all_rows);
  T* const sum = maximum + all_rows;
  T* const scores = room(scratch.scores, math.rows * step);
  const bool drops = blocks[0].drop_threshold > 0;
  T* const factors = room(scratch.factors, drops ? math.rows * step : 0);  // zeros at first, and always finite
  std::vector<T> keep(static_cast<size_t>(math.rows));
  for_each_head(placed, [&](const Placed<T>& at, const QueryRows<T>& head, int64_t h) {
    const int64_t row = at.row(h, 0), count = at.block->count;
    pack_queries(math, head.q, count, at.rows, dim, scale, q + row * q_width, q_width);
    for (int64_t i = 0; i < count; ++i) {
      const T lse = head.lse[i * head.lse_step];
      maximum[row + i] = lse;
      sum[row + i] = lse == -kInfinity<T> ? 0 : 1;
      if (lse != -kInfinity<T>) std::copy_n(head.out.at(i), dim, out + (row + i) * width);
    }
    std::fill(maximum + row + count, maximum + row + at.rows, -kInfinity<T>);
    std::fill(sum + row + count, sum + row + at.rows, T{0});
  });
  T* const k = room(scratch.k_columns, step * length);
  std::vector<KeyRows<T>> values;
  const Products<T> products(math);
  for_each_chunk(blocks, pieces, [&](std::span<const Part<T>> parts, std::span<const Part<T>> next) {
    const int64_t columns = columns_of(parts);
    const int64_t padded = round_up(columns, math.lanes);
    for (const Part<T>& part : parts) {
      math.transpose(from_row(part.piece->k, part.first), part.count(), dim, k, part.column);
    }
    clear_columns(k, math.panel, length, columns, padded);
    find_rows(math, parts, &KeyPiece<T>::v, dim, scratch.v, values);
    RowsAhead<T> ahead(next, dim, false, ceil_div(columns, math.panel) * tiles_of(placed, parts, math.rows));
    for (const int b : parts[0].piece->blocks) {
      const Placed<T>& at = placed[static_cast<size_t>(b)];
      const auto heads = static_cast<int64_t>(at.block->heads.size());
      TileRuns<T> tile(math, *at.block, parts, columns);
      for (int64_t i = 0; i < at.block->count; i += math.rows) {
        const int64_t n = std::min(math.rows, at.block->count - i);
        tile.find(i, n);
        if (tile.runs().empty()) continue;
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t row = at.row(h, i);
          scores_of(math, n, q + row * q_width, q_width, k, length, tile.runs(), scores, step, ahead);
          tile.hide(i, n, scores, step);
          const auto runs = static_cast<int64_t>(tile.runs().size());
          if (drops) tile.draw(at.block->heads[static_cast<size_t>(h)].philox_key, i, n, factors, step);
          math.softmax(n, scores, step, tile.runs().data(), runs, score_scale, drops ? factors : nullptr, maximum + row,
                       sum + row, keep.data());
          if (math.narrow != nullptr) math.narrow(n, scores, step, tile.runs().data(), runs, scores, step);
          add_rows(math, n, scores, step, tile.runs(), values, out + row * width, width, keep.data());
        }
      }
      if (done) done(static_cast<double>((at.past() - at.first) * columns));
    }
  });
  for_each_head(placed, [&](const Placed<T>& at, const QueryRows<T>& head, int64_t h) {
    for (int64_t i = 0; i < at.block->count; ++i) {
      const int64_t row = at.row(h, i);
      if (sum[row] == 0) continue;  // the row has seen no key so far
      head.lse[i * head.lse_step] = maximum[row] + std::log(sum[row]);
      const T share = 1 / sum[row];
      for (int64_t d = 0; d < dim; ++d) head.out.at(i)[d] = out[row * width + d] * share;
    }
  });
}

template <typename T>
void flash_backward(std::span<const QueryBlock<T>> blocks, std::span<const KeyPiece<T>> pieces, int64_t dim, T scale,
                    FlashScratch<T>& scratch, const FlashDone& done) {
  const TileMath<T>& math = math_for(blocks, pieces, dim, scale);
  const int64_t together = math.together,
                length = round_up(dim / together, math.depth);  // of the rows of q, dout, k and v
  const T score_scale = together == 1 ? 1 : scale;              // pairs are packed without a scale
  const std::vector<Placed<T>> placed = place(blocks, math.rows);
  const int64_t all_rows = placed.back().past(), width = round_up(dim, math.lanes);
  const int64_t q_width = round_up(length, math.lanes);
  const int64_t step = round_up(kMostKeys, math.panel) + round_up(math.rows, math.lanes);
  // q and dout are packed twice: for products with keys, and stacked for products with p and ds. Rows of numbers serve
  // both.
  const int64_t stacked_width = together == 1 ? width : width + kRowGap;
  const int64_t stacked = together == 1 ? 0 : all_rows / together * stacked_width;
  T* const q = room(scratch.q, all_rows * q_width + stacked);
  T* const dout = room(scratch.dout, all_rows * q_width + stacked);
  const int64_t unit = together * math.depth;  // the rows that a product adds up are a multiple of it
  T* const q_stacked = together == 1 ? q : q + all_rows * q_width;
  T* const dout_stacked = together == 1 ? dout : dout + all_rows * q_width;
  T* const dq = zeros(scratch.out, all_rows * width);
  T* const lse = room(scratch.per_row, 2 * all_rows);
  T* const delta = lse + all_rows;
  for_each_head(placed, [&](const Placed<T>& at, const QueryRows<T>& head, int64_t h) {
    const int64_t row = at.row(h, 0), count = at.block->count;
    pack_queries(math, head.q, count, at.rows, dim, scale, q + row * q_width, q_width);
    pack_queries(math, head.dout, count, at.rows, dim, T{1}, dout + row * q_width, q_width);
    if (together > 1) {
      const int64_t from = row / together * stacked_width;
      math.stack(head.q, count, dim, q_stacked + from, stacked_width, 0);
      math.stack(head.dout, count, dim, dout_stacked + from, stacked_width, 0);
      clear_rows(q_stacked + from, stacked_width, together, count, at.rows);
      clear_rows(dout_stacked + from, stacked_width, together, count, at.rows);
    }
    for (int64_t i = 0; i < at.rows; ++i) {
      lse[row + i] = i < count ? head.lse[i * head.lse_step] : kInfinity<T>;
      delta[row + i] = i < count ? head.delta[i * head.delta_step] : 0;
    }
  });
  T* const p = room(scratch.scores, math.held * step);
  T* const ds = room(scratch.gradients, math.held * step);
  const bool drops = blocks[0].drop_threshold > 0;
  T* const factors = room(scratch.factors, drops ? math.rows * step : 0);  // zeros at first, and always finite
  T* const narrowed = room(scratch.narrowed, math.narrow == nullptr ? 0 : math.rows * step);
  T* const k_columns = room(scratch.k_columns, step * length);
  T* const v_columns = room(scratch.v_columns, step * length);
  std::vector<KeyRows<T>> keys;
  std::vector<KeyTile<T>> tiles;
  const Products<T> products(math);
  for_each_chunk(blocks, pieces, [&](std::span<const Part<T>> parts, std::span<const Part<T>> next) {
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
    RowsAhead<T> ahead(next, dim, true, 2 * ceil_div(columns, math.panel) * tiles_of(placed, parts, math.rows));
    for (const int b : parts[0].piece->blocks) {
      const Placed<T>& at = placed[static_cast<size_t>(b)];
      const auto heads = static_cast<int64_t>(at.block->heads.size());
      find_rows_that_see(parts, at.block->positions, tiles);
      TileRuns<T> tile(math, *at.block, parts, columns);
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t held = 0; held < at.rows; held += math.held) {
          const int64_t past = std::min(at.rows, held + math.held);
          for (int64_t i = held; i < past; i += math.rows) {
            const int64_t n = std::min(math.rows, at.block->count - i), row = at.row(h, i);
            T *const p_rows = p + (i - held) * step, *const ds_rows = ds + (i - held) * step;
            const int64_t summed = round_up(n, unit);
            tile.find(i, n);
            clear_unseen(tiles, tile.runs(), i, math.rows, summed, p_rows, ds_rows, step);
            if (tile.runs().empty()) continue;
            scores_of(math, n, q + row * q_width, q_width, k_columns, length, tile.runs(), p_rows, step, ahead);
            scores_of(math, n, dout + row * q_width, q_width, v_columns, length, tile.runs(), ds_rows, step, ahead);
            tile.hide(i, n, p_rows, step);
            if (drops) tile.draw(at.block->heads[static_cast<size_t>(h)].philox_key, i, n, factors, step);
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
            const int64_t row = at.row(h, first) / together * stacked_width;
            const int64_t next = together * step;  // two rows of pairs are as far apart
            math.add_product(of_keys.keys, p + from, 1, next, dout_stacked + row, stacked_width, n, of_keys.dv.data,
                             of_keys.dv.step, width, nullptr);
            math.add_product(of_keys.keys, ds + from, 1, next, q_stacked + row, stacked_width, n, of_keys.dk.data,
                             of_keys.dk.step, width, nullptr);
          }
        }
      }
      if (done) done(static_cast<double>((at.past() - at.first) * columns));
    }
    if (!in_place) add_gradients(parts, dim, width, score_scale, scratch);
  });
  for_each_head(placed, [&](const Placed<T>& at, const QueryRows<T>& head, int64_t h) {
    for (int64_t i = 0; i < at.block->count; ++i) {
      T* const to = head.dq.at(i);
      const T* const from = dq + at.row(h, i) * width;
      for (int64_t d = 0; d < dim; ++d) to[d] += scale * from[d];
    }
  });
}

template void flash_forward(std::span<const QueryBlock<float>>, std::span<const KeyPiece<float>>, int64_t, float,
                            FlashScratch<float>&, const FlashDone&);
template void flash_forward(std::span<const QueryBlock<double>>, std::span<const KeyPiece<double>>, int64_t, double,
                            FlashScratch<double>&, const FlashDone&);
template void flash_backward(std::span<const QueryBlock<float>>, std::span<const KeyPiece<float>>, int64_t, float,
                             FlashScratch<float>&, const FlashDone&);
template void flash_backward(std::span<const QueryBlock<double>>, std::span<const KeyPiece<double>>, int64_t, double,
                             FlashScratch<double>&, const FlashDone&);

}  // namespace annulus
