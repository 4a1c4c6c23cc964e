// BlockMap: the active (query block, key block) pairs of a block-sparse pattern in CSR form, per batch row and query
// head or shared by all. It is made from a named map (local, bigbird, ...), loaded from a file, or selected from q and
// k (adaptive). pattern.cc makes slices from it. It is plain data on the host.
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
  int64_t batch = 1;    // 1: all batch rows share the map
  int64_t heads = 1;    // 1: all query heads share the map
  int64_t query_blocks = 0;
  int64_t key_blocks = 0;
  // The runs of (batch row b, head h, query block i) are runs[offsets[x]] to runs[offsets[x + 1] - 1] with x = (b *
  // heads + h) * query_blocks + i. They are ascending, disjoint and not adjacent.
  std::vector<int64_t> offsets;
  std::vector<BlockRun> runs;

  // Returns the fraction of block pairs that are active; 0 if there are no blocks.
  double density() const;
  // Returns the map as uint8 [batch, heads, query_blocks, key_blocks], row-major, with 1 for active pairs.
  std::vector<uint8_t> dense() const;
  // Returns a hash of the sizes and runs as 32 hexadecimal digits.
  std::string digest() const;
  int64_t bytes() const;  // of memory

  friend bool operator==(const BlockMap&, const BlockMap&) = default;
};

// Formats, for messages, the shapes that a map may have: "[1, 4 or 1, 16, 16]".
std::string block_map_shapes(int64_t batch, int64_t heads, int64_t query_blocks, int64_t key_blocks);

// Makes a map from uint8 [batch, heads, query_blocks, key_blocks], row-major, where nonzero values are active.
BlockMap block_map_from_dense(const uint8_t* active, int64_t block, int64_t batch, int64_t heads, int64_t query_blocks,
                              int64_t key_blocks);

}  // namespace annulus
