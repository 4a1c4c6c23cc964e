// Flash attention for blocks of query rows; see flash.h. tile_math.h has the vector code.
#include "attention/kernels/cpu/flash.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "attention/kernels/cpu/key_chunks.h"
#include "attention/kernels/cpu/row_tiles.h"
#include "attention/kernels/cpu/rows_ahead.h"
#include "attention/kernels/cpu/tile_runs.h"

namespace annulus {

using namespace cpu_flash;

namespace {

template <typename T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();

// Whether pairs of a row can be read as elements of 32 bits.
bool holds_pairs(const StoredRows& rows) {
  return rows.storage == ElementType::kBFloat16 && rows.step % 2 == 0 &&
         reinterpret_cast<uintptr_t>(rows.data) % 4 == 0;
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

}  // namespace

template <typename T>
void flash_forward(std::span<const QueryBlock<T>> blocks, std::span<const KeyPiece<T>> pieces, int64_t dim,
                   const Scoring<T>& scoring, FlashScratch<T>& scratch, const FlashDone& done) {
  const T scale = scoring.scale, softcap = scoring.softcap;
  const TileMath<T>& math = math_for(blocks, pieces, dim, scale);
  const int64_t together = math.together, length = round_up(dim / together, math.depth);  // of the rows of q and k
  const T score_scale = together == 1 ? 1 : scale;        // pairs are packed without a scale
  const T softmax_scale = softcap > 0 ? 1 : score_scale;  // of scores after the cap
  const Chunks<T> chunks(blocks, pieces);
  RowTiles<T> tiles(blocks, chunks, math.rows, math.rows);
  const int64_t all_rows = tiles.rows(), width = round_up(dim, math.lanes);
  const int64_t q_width = round_up(length, math.lanes);
  const int64_t step = round_up(kMostKeys, math.panel) + kRowGap;
  T* const q = room(scratch.q, all_rows * q_width);
  T* const out = room(scratch.out, all_rows * width);
  T* const maximum = room(scratch.per_row, 2 * all_rows);
  T* const sum = maximum + all_rows;
  T* const scores = room(scratch.scores, math.rows * step);
  const bool drops = blocks[0].drop_threshold > 0;
  T* const factors = zeros(scratch.factors, drops ? math.rows * step : 0);  // finite, even in columns without a key
  T keep[kMostTileRows] = {};
  // Rows i, ..., i + n - 1 of a head, which begin at `row` in scratch memory, and those that fill up the tile.
  const auto begin = [&](const QueryRows<T>& head, int64_t i, int64_t n, int64_t row) {
    pack_queries(math, from_row(head.q, i), n, math.rows, dim, scale, q + row * q_width, q_width);
    std::fill_n(out + row * width, math.rows * width, T{0});
    std::fill_n(maximum + row, math.rows, -kInfinity<T>);
    std::fill_n(sum + row, math.rows, T{0});
    for (int64_t r = 0; r < n; ++r) {
      const T lse = head.lse[(i + r) * head.lse_step];
      if (lse == -kInfinity<T>) continue;
      maximum[row + r] = lse;
      sum[row + r] = 1;
      std::copy_n(static_cast<const T*>(head.out.at(i + r)), dim, out + (row + r) * width);
    }
  };
  const auto end = [&](const QueryRows<T>& head, int64_t i, int64_t n, int64_t row) {
    for (int64_t r = 0; r < n; ++r) {
      if (sum[row + r] == 0) continue;  // the row has seen no key so far
      head.lse[(i + r) * head.lse_step] = maximum[row + r] + std::log(sum[row + r]);
      math.put(out + (row + r) * width, dim, 1 / sum[row + r], head.out.at(i + r), head.out.put(false));
    }
  };
  T* const k = room(scratch.k_columns, step * length);
  std::vector<KeyRows<T>> values;
  const Products<T> products(math);
  for (size_t c = 0; c < chunks.size(); ++c) {
    const std::span<const Part<T>> parts = chunks[c];
    const int64_t columns = columns_of(parts);
    const int64_t padded = round_up(columns, math.lanes);
    for (const Part<T>& part : parts) {
      math.transpose(from_row(part.piece->k, part.first), part.count(), dim, k, part.column);
    }
    clear_columns(k, math.panel, length, columns, padded);
    find_rows(math, parts, &KeyPiece<T>::v, dim, scratch.v, values);
    RowsAhead<T> ahead(chunks[c + 1], dim, false, tiles.seen_tiles(parts));
    for (const int b : chunks.blocks(c)) {
      const QueryBlock<T>& block = blocks[static_cast<size_t>(b)];
      const Run rows = tiles.seen(b, parts);
      TileRuns<T> tile(math, block, parts, columns);
      for (int64_t i = rows.first; i < rows.past; i += math.rows) {
        const int64_t n = std::min(math.rows, block.count - i), past = std::min(block.count, i + 2 * math.rows);
        tile.find(i, n);
        for (int64_t h = 0; h < std::ssize(block.heads); ++h) {
          const QueryRows<T>& head = block.heads[static_cast<size_t>(h)];
          const size_t unit = tiles.unit(b, h, i);
          const int64_t row = tiles.row(unit);
          if (tiles.begin(unit, 0)) {
            begin(head, i, n, row);
            ahead.add(head.q, i + n, past);
          }
          const bool ends = tiles.ends(unit, c);
          if (ends) ahead.add(head.out, i, i + n);
          if (!tile.runs().empty()) {
            scores_of(math, n, q + row * q_width, q_width, k, length, tile.runs(), scores, step, ahead);
            const auto runs = static_cast<int64_t>(tile.runs().size());
            if (softcap > 0) math.cap(n, scores, step, tile.runs().data(), runs, score_scale, softcap);
            tile.hide(i, n, scores, step);
            if (drops) tile.draw(head.philox_key, i, n, factors, step);
            math.softmax(n, scores, step, tile.runs().data(), runs, softmax_scale, drops ? factors : nullptr,
                         maximum + row, sum + row, keep);
            if (math.narrow != nullptr) math.narrow(n, scores, step, tile.runs().data(), runs, scores, step);
            add_rows(math, n, scores, step, tile.summed(), values, out + row * width, width, keep);
          }
          if (!ends) continue;
          end(head, i, n, row);
          tiles.free(unit);
        }
      }
      if (done) done(static_cast<double>((rows.past - rows.first) * std::ssize(block.heads) * columns));
    }
  }
}

template <typename T>
void flash_backward(std::span<const QueryBlock<T>> blocks, std::span<const KeyPiece<T>> pieces, int64_t dim,
                    const Scoring<T>& scoring, FlashScratch<T>& scratch, const FlashDone& done) {
  const T scale = scoring.scale, softcap = scoring.softcap;
  const TileMath<T>& math = math_for(blocks, pieces, dim, scale);
  const int64_t together = math.together,
                length = round_up(dim / together, math.depth);  // of the rows of q, dout, k and v
  const T score_scale = together == 1 ? 1 : scale;              // pairs are packed without a scale
  const T softmax_scale = softcap > 0 ? 1 : score_scale;        // of scores after the cap
  const Chunks<T> chunks(blocks, pieces);
  RowTiles<T> tiles(blocks, chunks, math.rows, math.held);
  const int64_t most_held = tiles.unit_rows();  // the rows whose scores are held at once
  const int64_t all_rows = tiles.rows(), width = round_up(dim, math.lanes);
  const int64_t q_width = round_up(length, math.lanes);
  const int64_t step = round_up(kMostKeys, math.panel) + round_up(math.rows, math.lanes);
  // q and dout are packed twice: for products with keys, and stacked for products with p and ds. Rows of numbers serve
  // both.
  const int64_t stacked_width = together == 1 ? width : width + kRowGap;
  const int64_t stacked = together == 1 ? 0 : all_rows / together * stacked_width;
  T* const q = room(scratch.q, all_rows * q_width + stacked);
  T* const dout = room(scratch.dout, all_rows * q_width + stacked);
  const int64_t depth = together * math.depth;  // the rows that a product adds up are a multiple of it
  T* const q_stacked = together == 1 ? q : q + all_rows * q_width;
  T* const dout_stacked = together == 1 ? dout : dout + all_rows * q_width;
  T* const dq = room(scratch.out, all_rows * width);
  T* const lse = room(scratch.per_row, 2 * all_rows);
  T* const delta = lse + all_rows;
  // Rows i, ..., i + n - 1 of a head, which begin at `row` in scratch memory, and those that fill up the tile.
  const auto begin = [&](const QueryRows<T>& head, int64_t i, int64_t n, int64_t row) {
    const StoredRows q_rows = from_row(head.q, i), dout_rows = from_row(head.dout, i);
    pack_queries(math, q_rows, n, math.rows, dim, scale, q + row * q_width, q_width);
    pack_queries(math, dout_rows, n, math.rows, dim, T{1}, dout + row * q_width, q_width);
    if (together > 1) {
      const int64_t from = row / together * stacked_width;
      math.stack(q_rows, n, dim, q_stacked + from, stacked_width, 0);
      math.stack(dout_rows, n, dim, dout_stacked + from, stacked_width, 0);
      clear_rows(q_stacked + from, stacked_width, together, n, math.rows);
      clear_rows(dout_stacked + from, stacked_width, together, n, math.rows);
    }
    std::fill_n(dq + row * width, math.rows * width, T{0});
    std::fill_n(lse + row, math.rows, kInfinity<T>);
    std::fill_n(delta + row, math.rows, T{0});
    for (int64_t r = 0; r < n; ++r) lse[row + r] = head.lse[(i + r) * head.lse_step];
    math.dots(dout_rows, from_row(head.result, i), n, dim, delta + row, 1);
  };
  T* const p = room(scratch.scores, most_held * step);
  T* const ds = room(scratch.gradients, most_held * step);
  const bool drops = blocks[0].drop_threshold > 0;
  T* const factors = zeros(scratch.factors, drops ? math.rows * step : 0);  // finite, even in columns without a key
  T* const narrowed = room(scratch.narrowed, math.narrow == nullptr ? 0 : math.rows * step);
  T* const k_columns = room(scratch.k_columns, step * length);
  T* const v_columns = room(scratch.v_columns, step * length);
  std::vector<KeyRows<T>> keys;
  std::vector<KeyTile> key_tiles;
  const Products<T> products(math);
  for (size_t c = 0; c < chunks.size(); ++c) {
    const std::span<const Part<T>> parts = chunks[c];
    const int64_t columns = columns_of(parts);
    const int64_t padded = round_up(columns, math.lanes);
    for (const Part<T>& part : parts) {
      math.transpose(from_row(part.piece->k, part.first), part.count(), dim, k_columns, part.column);
      math.transpose(from_row(part.piece->v, part.first), part.count(), dim, v_columns, part.column);
    }
    clear_columns(k_columns, math.panel, length, columns, padded);
    clear_columns(v_columns, math.panel, length, columns, padded);
    find_rows(math, parts, &KeyPiece<T>::k, dim, scratch.k, keys);
    find_tiles(columns, math.rows, key_tiles);
    const KeySums<T> sums(math, columns, width, scratch);
    RowsAhead<T> ahead(chunks[c + 1], dim, true, 2 * tiles.seen_tiles(parts));
    // Computes p and ds of rows i, ..., i + n - 1, which begin at `row` in scratch memory, and adds what they give dq.
    const auto add_dq = [&](const QueryRows<T>& head, const TileRuns<T>& tile, int64_t i, int64_t n, int64_t row,
                            T* p_rows, T* ds_rows) {
      const int64_t summed = round_up(n, depth);
      scores_of(math, n, q + row * q_width, q_width, k_columns, length, tile.runs(), p_rows, step, ahead);
      scores_of(math, n, dout + row * q_width, q_width, v_columns, length, tile.runs(), ds_rows, step, ahead);
      const auto runs = static_cast<int64_t>(tile.runs().size());
      if (softcap > 0) math.cap(n, p_rows, step, tile.runs().data(), runs, score_scale, softcap);
      tile.hide(i, n, p_rows, step);
      if (drops) tile.draw(head.philox_key, i, n, factors, step);
      math.gradient(n, p_rows, ds_rows, step, tile.runs().data(), runs, softmax_scale, softcap > 0 ? 1 / softcap : 0,
                    drops ? factors : nullptr, lse + row, delta + row);
      tile.clear_padding(n, summed, p_rows, ds_rows, step);
      const T* ds_operand = ds_rows;
      if (math.narrow != nullptr) {
        math.narrow(n, ds_rows, step, tile.runs().data(), runs, narrowed, step);
        ds_operand = narrowed;
        math.zip(summed, p_rows, step, padded);
        math.zip(summed, ds_rows, step, padded);
      }
      add_rows(math, n, ds_operand, step, tile.summed(), keys, dq + row * width, width, static_cast<const T*>(nullptr));
    };
    // Adds what rows held, ..., past - 1 give dk and dv. They begin at `row` in scratch memory.
    const auto add_dk_and_dv = [&](int64_t held, int64_t past, int64_t row) {
      for (KeyTile& of_keys : key_tiles) {
        const int64_t first = std::max(of_keys.first, held) / depth * depth;
        const int64_t n = ceil_div(std::min(of_keys.past, past) - first, depth) * math.depth;
        if (n <= 0) continue;
        const bool set = !std::exchange(of_keys.has_sums, true);
        const auto add = [&](const T* rows, const T* stacked, const Rows<T>& to) {
          const int64_t next = together * step;  // two rows of pairs are as far apart
          math.add_product(of_keys.keys, rows + (first - held) * step + of_keys.column, 1, next,
                           stacked + (row + first - held) / together * stacked_width, stacked_width, n,
                           to.at(of_keys.column), to.step, width, nullptr, set);
        };
        add(p, dout_stacked, sums.dv);
        add(ds, q_stacked, sums.dk);
      }
    };
    for (const int b : chunks.blocks(c)) {
      const QueryBlock<T>& block = blocks[static_cast<size_t>(b)];
      find_rows_that_see(parts, block.positions, key_tiles);
      const Run rows = tiles.seen(b, parts);
      TileRuns<T> tile(math, block, parts, columns);
      for (int64_t h = 0; h < std::ssize(block.heads); ++h) {
        const QueryRows<T>& head = block.heads[static_cast<size_t>(h)];
        for (int64_t held = rows.first / most_held * most_held; held < rows.past; held += most_held) {
          const int64_t past = std::min(rows.past, held + most_held);
          const size_t unit = tiles.unit(b, h, held);
          const int64_t first_row = tiles.row(unit);
          const bool ends = tiles.ends(unit, c);
          for (int64_t i = std::max(held, rows.first); i < past; i += math.rows) {
            const int64_t n = std::min(math.rows, block.count - i), row = first_row + i - held;
            T *const p_rows = p + (i - held) * step, *const ds_rows = ds + (i - held) * step;
            if (tiles.begin(unit, i - held)) {
              begin(head, i, n, row);
              const int64_t next = std::min(block.count, i + 2 * math.rows);
              for (const StoredRows& of_head : {head.q, head.dout, head.result}) ahead.add(of_head, i + n, next);
            }
            if (ends) ahead.add(head.dq, i, i + n);
            tile.find(i, n);
            clear_unseen(key_tiles, tile.runs(), i, math.rows, round_up(n, depth), p_rows, ds_rows, step);
            if (!tile.runs().empty()) add_dq(head, tile, i, n, row, p_rows, ds_rows);
          }
          add_dk_and_dv(held, past, first_row);
          if (!ends) continue;
          for (int64_t i = held; i < std::min(block.count, held + most_held); ++i) {
            if (!tiles.begun(unit, i - held)) continue;
            math.put(dq + (first_row + i - held) * width, dim, scale, head.dq.at(i),
                     head.dq.put(head.written.test_and_set(i)));
          }
          tiles.free(unit);
        }
      }
      if (done) done(static_cast<double>((rows.past - rows.first) * std::ssize(block.heads) * columns));
    }
    add_gradients(math, parts, key_tiles, sums, dim, score_scale);
  }
}

template void flash_forward(std::span<const QueryBlock<float>>, std::span<const KeyPiece<float>>, int64_t,
                            const Scoring<float>&, FlashScratch<float>&, const FlashDone&);
template void flash_forward(std::span<const QueryBlock<double>>, std::span<const KeyPiece<double>>, int64_t,
                            const Scoring<double>&, FlashScratch<double>&, const FlashDone&);
template void flash_backward(std::span<const QueryBlock<float>>, std::span<const KeyPiece<float>>, int64_t,
                             const Scoring<float>&, FlashScratch<float>&, const FlashDone&);
template void flash_backward(std::span<const QueryBlock<double>>, std::span<const KeyPiece<double>>, int64_t,
                             const Scoring<double>&, FlashScratch<double>&, const FlashDone&);

}  // namespace annulus
