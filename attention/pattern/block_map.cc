// Measures, hashes and converts block maps; see block_map.h.
#include "attention/pattern/block_map.h"

#include <algorithm>

#include "common/checksum.h"

namespace annulus {

double BlockMap::density() const {
  int64_t active = 0;
  for (const BlockRun& run : runs) active += run.end - run.begin;
  const double all = static_cast<double>(batch * heads) * static_cast<double>(query_blocks * key_blocks);
  return all == 0 ? 0 : static_cast<double>(active) / all;
}

std::vector<uint8_t> BlockMap::dense() const {
  const int64_t rows = batch * heads * query_blocks;
  std::vector<uint8_t> active(static_cast<size_t>(rows * key_blocks), 0);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t r = offsets[static_cast<size_t>(row)]; r < offsets[static_cast<size_t>(row) + 1]; ++r) {
      const BlockRun& run = runs[static_cast<size_t>(r)];
      std::fill(active.begin() + row * key_blocks + run.begin, active.begin() + row * key_blocks + run.end, uint8_t{1});
    }
  }
  return active;
}

std::string BlockMap::digest() const {
  Checksum sum;
  for (const int64_t size : {block, batch, heads, query_blocks, key_blocks}) sum.update(&size, sizeof(size));
  sum.update(offsets.data(), offsets.size() * sizeof(int64_t));
  sum.update(runs.data(), runs.size() * sizeof(BlockRun));
  return sum.hex();
}

int64_t BlockMap::bytes() const {
  return static_cast<int64_t>(sizeof(*this) + offsets.capacity() * sizeof(int64_t) +
                              runs.capacity() * sizeof(BlockRun));
}

BlockMap block_map_from_dense(const uint8_t* active, int64_t block, int64_t batch, int64_t heads, int64_t query_blocks,
                              int64_t key_blocks) {
  BlockMap map{block, batch, heads, query_blocks, key_blocks, {0}, {}};
  for (int64_t row = 0; row < batch * heads * query_blocks; ++row, active += key_blocks) {
    for (int64_t j = 0; j < key_blocks; ++j) {
      if (!active[j]) continue;
      if (j > 0 && active[j - 1]) {
        map.runs.back().end = j + 1;
      } else {
        map.runs.push_back({j, j + 1});
      }
    }
    map.offsets.push_back(static_cast<int64_t>(map.runs.size()));
  }
  return map;
}

std::string block_map_shapes(int64_t batch, int64_t heads, int64_t query_blocks, int64_t key_blocks) {
  const auto or_one = [](int64_t n) { return n == 1 ? "1" : std::to_string(n) + " or 1"; };
  return "[" + or_one(batch) + ", " + or_one(heads) + ", " + std::to_string(query_blocks) + ", " +
         std::to_string(key_blocks) + "]";
}

}  // namespace annulus
