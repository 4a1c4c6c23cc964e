// BlockMap: which (query block, key block) pairs of a block-sparse pattern are active, per batch row and query head or
// shared by them. Made from a named map (local, bigbird, ...), read from a file, or selected from q and k (adaptive);
// slices are made from it (pattern.cc). Plain data, no device.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace annulus {

// Key blocks [begin, end).
struct BlockRun {
  int64_t begin = 0;
  int64_t end = 0;
  friend bool operator==(const BlockRun&, const BlockRun&) = default;
};

struct BlockMap {
  int64_t block = 128;  // tokens on each side of a block
  int64_t batch = 1;    // 1: all batch rows alike
  int64_t heads = 1;    // 1: all query heads alike
  int64_t query_blocks = 0;
  int64_t key_blocks = 0;
  // The runs of (batch row b, head h, query block i) are runs[offsets[x]] to runs[offsets[x + 1] - 1] with x = (b *
  // heads + h) * query_blocks + i: ascending, disjoint, none touching the next.
  std::vector<int64_t> offsets;
  std::vector<BlockRun> runs;

  // Active pairs over all pairs of blocks, 0 where there are none.
  double density() const;
  // uint8 [batch, heads, query_blocks, key_blocks], row-major: 1 where active.
  std::vector<uint8_t> dense() const;
  // Of the sizes and the runs: equal maps have equal digests. 32 hexadecimal digits.
  std::string digest() const;
  int64_t bytes() const;  // of memory

  friend bool operator==(const BlockMap&, const BlockMap&) = default;
};

// The shapes that a map may have for so many batch rows, heads and blocks: "[1, 4 or 1, 16, 16]".
std::string block_map_shapes(int64_t batch, int64_t heads, int64_t query_blocks, int64_t key_blocks);

// From uint8 [batch, heads, query_blocks, key_blocks]; anything but 0 is active.
BlockMap block_map_from_dense(const uint8_t* active, int64_t block, int64_t batch, int64_t heads, int64_t query_blocks,
                              int64_t key_blocks);

}  // namespace annulus
