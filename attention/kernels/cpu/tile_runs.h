// Finds which scores of a register tile of flash attention on CPUs are computed, and which of them are masked. Used by
// flash.cc.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "attention/dropout/draws.h"
#include "attention/kernels/cpu/flash.h"
#include "attention/kernels/cpu/key_chunks.h"
#include "attention/tiles/tile_groups.h"

namespace annulus::cpu_flash {

// The scores of a register tile's rows with a chunk that are computed: runs of columns that some row sees, rounded to
// whole vectors, so that the cost of a tile follows its pairs. Masked pairs within the runs get the score -inf.
// Products that sum over columns need no whole vectors, so summed() omits most columns that no row sees.
template <typename T>
class TileRuns {
 public:
  TileRuns(const TileMath<T>& math, const QueryBlock<T>& block, std::span<const Part<T>> parts, int64_t columns)
      : math_(math),
        block_(block),
        parts_(parts),
        padded_(columns % math.lanes != 0),
        masked_(std::ranges::any_of(parts, [](const Part<T>& part) { return part.piece->mask != nullptr; })) {}

  // Finds the runs for rows row, ..., row + n - 1 of the block, and the bits of their masks.
  void find(int64_t row, int64_t n) {
    runs_.clear(), summed_.clear();
    hides_ = padded_;
    const Span queries = block_.positions.sub(row, n);
    for (const Part<T>& part : parts_) {
      Run seen = part.columns();
      if (part.cut) {
        seen = part.seen_by(queries);
        // Columns that the first and the last row see, the rows between them see as well.
        hides_ = hides_ || part.seen_by(queries.sub(0, 1)) != part.columns() ||
                 part.seen_by(queries.sub(n - 1, 1)) != part.columns();
      }
      if (seen.empty()) continue;
      add(seen, math_.lanes, runs_);
      add(seen, math_.together * math_.depth, summed_);
    }
    if (masked_ && !runs_.empty()) find_bits(queries);
  }
  const std::vector<Run>& runs() const { return runs_; }
  const std::vector<Run>& summed() const { return summed_; }  // the columns that products sum over

  // Sets the scores in the runs that rows row, ..., row + n - 1 do not see to -inf.
  void hide(int64_t row, int64_t n, T* scores, int64_t step) const {
    if (masked_) {
      math_.hide_bits(n, scores, step, runs_.data(), static_cast<int64_t>(runs_.size()), shown_.data(), kShownWords);
    }
    if (!hides_) return;
    int64_t from[kMostTileRows], past[kMostTileRows], next[kMostTileRows];  // row r is masked in [from[r], past[r])
    for (const Run& run : runs_) {
      std::fill_n(from, n, run.first);
      for (const Part<T>& part : parts_) {
        if (part.column >= run.past || part.column + part.count() <= run.first) continue;
        part.seen_by_each(block_.positions.sub(row, n), past, next);
        for (int64_t r = 0; r < n; ++r) {
          const bool none = next[r] <= past[r];
          past[r] = none ? from[r] : std::clamp(past[r], run.first, run.past);
          next[r] = none ? from[r] : std::clamp(next[r], run.first, run.past);
        }
        math_.hide(n, scores, step, from, past);
        std::copy_n(next, n, from);
      }
      std::fill_n(past, n, run.past);
      math_.hide(n, scores, step, from, past);
    }
  }

  // Draws the dropout factors of the pairs of rows row, ..., row + n - 1 in the runs; columns without a key keep
  // theirs.
  void draw(uint64_t philox_key, int64_t row, int64_t n, T* factors, int64_t step) const {
    for (int64_t r = 0; r < n; ++r) {
      const int64_t query = block_.positions.at(row + r);
      for (const Run& run : runs_) {
        for (const Part<T>& part : parts_) {
          const int64_t first = std::max(run.first, part.column), past = std::min(run.past, part.column + part.count());
          if (first >= past) continue;
          const Span keys = part.piece->positions.sub(part.first + first - part.column, past - first);
          draw_row(philox_key, query, keys, block_.drop_threshold, block_.kept, factors + r * step + first);
        }
      }
    }
  }

  // Zeroes the padding rows [n, past) of a product's operands, so that they add nothing to dk and dv, even with
  // infinite keys.
  void clear_padding(int64_t n, int64_t past, T* p, T* ds, int64_t step) const {
    for (int64_t r = n; r < past; ++r) {
      for (const Run& run : runs_) {
        std::fill(p + r * step + run.first, p + r * step + run.past, T{0});
        std::fill(ds + r * step + run.first, ds + r * step + run.past, T{0});
      }
    }
  }

 private:
  // Appends columns, extended to multiples of `unit`, to ascending runs.
  static void add(const Run& seen, int64_t unit, std::vector<Run>& runs) {
    const Run run{seen.first / unit * unit, round_up(seen.past, unit)};
    if (!runs.empty() && run.first <= runs.back().past) {
      runs.back().past = std::max(runs.back().past, run.past);
    } else {
      runs.push_back(run);
    }
  }

  static constexpr int64_t kShownWords = kMostKeys / 64;  // of a row

  // Sets the bits of the columns of a chunk: of the parts with a mask those of the mask, and 1 elsewhere.
  void find_bits(const Span& queries) {
    shown_.assign(static_cast<size_t>(queries.count * kShownWords), ~uint64_t{0});
    for (const Part<T>& part : parts_) {
      if (part.piece->mask == nullptr) continue;
      const Span keys = part.piece->positions.sub(part.first, part.count());
      uint64_t* row = shown_.data();
      for (int64_t i = 0; i < queries.count; ++i, row += kShownWords) {
        const MaskBits bits = part.piece->mask->bits(queries.at(i), keys.begin);
        if (keys.stride == 1) {
          copy_bits(bits.words, keys.begin - bits.first_key, part.count(), row, part.column);
          continue;
        }
        for (int64_t j = 0; j < keys.count; ++j) {
          const int64_t column = part.column + j;
          if (!bits.shows(keys.at(j))) row[column / 64] &= ~(uint64_t{1} << (column % 64));
        }
      }
    }
  }
  // Clears those of the `count` bits from `column` on of `to` that are 0 from bit `at` on of `from`.
  static void copy_bits(const uint64_t* from, int64_t at, int64_t count, uint64_t* to, int64_t column) {
    while (count > 0) {
      const int64_t n = std::min({count, 64 - at % 64, 64 - column % 64});
      const uint64_t hidden = ~(from[at / 64] >> (at % 64)) & (~uint64_t{0} >> (64 - n));
      to[column / 64] &= ~(hidden << (column % 64));
      at += n, column += n, count -= n;
    }
  }

  const TileMath<T>& math_;
  const QueryBlock<T>& block_;
  std::span<const Part<T>> parts_;
  bool padded_;         // the chunk's last vector has columns without a key
  bool masked_;         // some part has a mask of tokens
  bool hides_ = false;  // some row may not see some column
  std::vector<Run> runs_, summed_;
  std::vector<uint64_t> shown_;  // kShownWords for each of the rows
};

}  // namespace annulus::cpu_flash
