// Where the query rows of a call of flash attention on CPUs lie in scratch memory, and when they come there and leave
// it. Used by flash.cc.
#pragma once

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "attention/kernels/cpu/flash.h"
#include "attention/kernels/cpu/key_chunks.h"

namespace annulus::cpu_flash {

// Gives the rows of blocks places in scratch memory. A place holds a unit: adjacent rows of a head, whole register
// tiles. The rows of a call are not adjacent in memory and may not be in any cache. They are packed when a chunk first
// needs them and written after the last one that they see, one tile at a time, so that the processor can fetch the rows
// of one tile while it computes with another. A narrow window has few rows in use at a time, and their places, which
// are used again and again, stay in the caches. The rows of several blocks, which have most of their keys in common,
// are in use at the same time. They have places of their own, because places of one size would waste memory where
// blocks are of different lengths.
template <typename T>
class RowTiles {
 public:
  // A register tile has `tile` rows, and a unit at most `most`, a multiple of them.
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

  // The rows for which there are places, and those of a unit.
  int64_t rows() const { return rows_; }
  int64_t unit_rows() const { return unit_; }

  // The rows of block b between the first and the last that see some key of a chunk, in whole tiles.
  Run seen(int b, std::span<const Part<T>> parts) const {
    const Span rows = rows_that_see(parts, blocks_[static_cast<size_t>(b)].positions);
    return {rows.begin / tile_ * tile_, round_up(rows.begin + rows.count, tile_)};
  }
  // The number of tiles that see some key of a chunk, of all heads and blocks together.
  int64_t seen_tiles(std::span<const Part<T>> parts) const {
    int64_t tiles = 0;
    for (const int b : parts.front().piece->blocks) {
      const Run rows = seen(b, parts);
      tiles += (rows.past - rows.first) / tile_ * std::ssize(blocks_[static_cast<size_t>(b)].heads);
    }
    return tiles;
  }

  // The number of the unit of row i of a head, which the functions below take.
  size_t unit(int b, int64_t head, int64_t i) const {
    const QueryBlock<T>& block = blocks_[static_cast<size_t>(b)];
    return static_cast<size_t>(first_unit_[static_cast<size_t>(b)] + head * ceil_div(block.count, unit_) + i / unit_);
  }
  // Whether a chunk is the last one that rows of a unit see.
  bool ends(size_t unit, size_t chunk) const { return last_[unit] == chunk; }
  // The row in scratch memory of the first row of a unit.
  int64_t row(size_t unit) {
    if (places_[unit] == kNone) places_[unit] = free_.back(), free_.pop_back();
    return places_[unit];
  }
  // Returns whether the tile that begins with row i of a unit must be packed, and takes note that it is.
  bool begin(size_t unit, int64_t i) { return std::exchange(begun_[tile(unit, i)], uint8_t{1}) == 0; }
  // Whether the tile of row i of a unit has been packed.
  bool begun(size_t unit, int64_t i) const { return begun_[tile(unit, i)] != 0; }
  // The place of a unit becomes free.
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
  std::vector<int64_t> free_;        // places that hold no rows; the next one to use is the last
};

}  // namespace annulus::cpu_flash
