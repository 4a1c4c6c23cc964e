// Manages the query rows of a call of flash attention on CPUs in scratch memory. Used by flash.cc.
#pragma once

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "attention/kernels/cpu/flash.h"
#include "attention/kernels/cpu/key_chunks.h"

namespace annulus::cpu_flash {

// Assigns places in scratch memory to units of rows: adjacent rows of a head, in whole register tiles. The rows of a
// call are not adjacent in memory and may not be in any cache. They are packed when a chunk first needs them and
// written back after the last chunk that they see, one tile at a time, so that rows of one tile can be prefetched
// during the computation of another. With one block, places are reused, so that a narrow window, which needs few rows
// at a time, stays in the caches. The rows of several blocks, which share most of their keys, are in use at the same
// time, so each unit has its own place, sized by its block.
template <typename T>
class RowTiles {
 public:
  // A register tile has `tile` rows; a unit has at most `most`, a multiple of `tile`.
  RowTiles(std::span<const QueryBlock<T>> blocks, const Chunks<T>& chunks, int64_t tile, int64_t most)
      : blocks_(blocks), tile_(tile) {
    int64_t longest = 1;
    for (const QueryBlock<T>& block : blocks) longest = std::max(longest, block.count);
    unit_ = round_up(ceil_div(longest, ceil_div(longest, most)), tile);
    tiles_ = static_cast<size_t>(unit_ / tile);
    for (const QueryBlock<T>& block : blocks) {
      first_unit_.push_back(std::ssize(places_));
      for (int64_t h = 0; h < std::ssize(block.heads); ++h) {
        for (int64_t i = 0; i < block.count; i += unit_) {
          places_.push_back(rows_);
          rows_ += round_up(std::min(unit_, block.count - i), tile);
        }
      }
    }
    if (blocks.size() == 1) {
      rows_ = std::ssize(places_) * unit_;
      for (int64_t row = rows_ - unit_; row >= 0; row -= unit_) free_.push_back(row);
      std::fill(places_.begin(), places_.end(), kNone);
    }
    last_.assign(places_.size(), 0);
    begun_.assign(places_.size() * tiles_, 0);
    for (size_t chunk = 0; chunk < chunks.size(); ++chunk) {
      for (const int b : chunks.blocks(chunk)) {
        const Run rows = seen(b, chunks[chunk]);
        for (int64_t h = 0; h < std::ssize(blocks[static_cast<size_t>(b)].heads); ++h) {
          for (int64_t i = rows.first / unit_ * unit_; i < rows.past; i += unit_) last_[unit(b, h, i)] = chunk;
        }
      }
    }
  }

  // Return the number of rows in scratch memory, and of a unit.
  int64_t rows() const { return rows_; }
  int64_t unit_rows() const { return unit_; }

  // Returns the range of block b's rows, in whole tiles, that see some key of a chunk.
  Run seen(int b, std::span<const Part<T>> parts) const {
    const Span rows = rows_that_see(parts, blocks_[static_cast<size_t>(b)].positions);
    return {rows.begin / tile_ * tile_, round_up(rows.begin + rows.count, tile_)};
  }
  // Returns the number of tiles that see some key of a chunk, over all heads and blocks.
  int64_t seen_tiles(std::span<const Part<T>> parts) const {
    int64_t tiles = 0;
    for (const int b : parts.front().piece->blocks) {
      const Run rows = seen(b, parts);
      tiles += (rows.past - rows.first) / tile_ * std::ssize(blocks_[static_cast<size_t>(b)].heads);
    }
    return tiles;
  }

  // Returns the unit of row i of a head, an argument of the functions below.
  size_t unit(int b, int64_t head, int64_t i) const {
    const QueryBlock<T>& block = blocks_[static_cast<size_t>(b)];
    return static_cast<size_t>(first_unit_[static_cast<size_t>(b)] + head * ceil_div(block.count, unit_) + i / unit_);
  }
  // Returns whether a chunk is the last one that rows of a unit see.
  bool ends(size_t unit, size_t chunk) const { return last_[unit] == chunk; }
  // Returns the row in scratch memory of a unit's first row, and assigns a place if the unit has none.
  int64_t row(size_t unit) {
    if (places_[unit] == kNone) places_[unit] = free_.back(), free_.pop_back();
    return places_[unit];
  }
  // Marks the tile of row i of a unit as packed; returns whether it was not.
  bool begin(size_t unit, int64_t i) { return std::exchange(begun_[tile(unit, i)], uint8_t{1}) == 0; }
  // Returns whether the tile of row i of a unit has been packed.
  bool begun(size_t unit, int64_t i) const { return begun_[tile(unit, i)] != 0; }
  // Releases the place of a unit.
  void free(size_t unit) { free_.push_back(std::exchange(places_[unit], kNone)); }

 private:
  static constexpr int64_t kNone = -1;

  size_t tile(size_t unit, int64_t i) const { return unit * tiles_ + static_cast<size_t>(i / tile_); }

  std::span<const QueryBlock<T>> blocks_;
  int64_t tile_, unit_ = 0, rows_ = 0;
  size_t tiles_ = 0;                 // of a unit
  std::vector<int64_t> first_unit_;  // of each block
  std::vector<size_t> last_;         // the last chunk that a unit's rows see
  std::vector<int64_t> places_;      // the first row of the place of each unit, or kNone
  std::vector<uint8_t> begun_;       // for each tile of each unit
  std::vector<int64_t> free_;        // a stack of free places
};

}  // namespace annulus::cpu_flash
