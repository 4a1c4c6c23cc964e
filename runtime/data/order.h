// SourceOrder: in which order the rows of a source are drawn. Used by the dataset. Every rank computes the same row
// from the number of a draw alone.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/data/permutation.h"
#include "runtime/data/row_index.h"

namespace annulus {

// Draws are numbered from 0 over the whole run. Each epoch takes every training row once, in an order of its own, in
// O(1) memory. Thread-safe while change() is not being called.
class SourceOrder {
 public:
  // source: its name or digest, so that sources of the same length have orders of their own. Raises Error(kInput) if
  // the index has no training row.
  SourceOrder(int64_t seed, std::string_view source, std::shared_ptr<const RowIndex> index);

  struct Drawn {
    const RowIndex* index;  // lives as long as this order
    int64_t row;            // a row of its training part
    int64_t epoch;          // the first is 0
  };
  Drawn at(int64_t draw) const;

  // From this draw on, rows are those of `index`, with another context: first what is left of the epoch, packed again
  // with its settings (in memory if `folder` is empty, otherwise found there or made), then whole epochs. Changes at
  // later draws are forgotten. Tokens that were targets in this epoch are not again; each of the others is once. If
  // only one of the two indexes keeps documents apart, the next epoch begins instead.
  void change(int64_t draw, std::shared_ptr<const RowIndex> index, const std::string& folder = "",
              FileSystem& files = FileSystem::real());

  // Epochs that the draws before this one have completed, and the share of the epoch that they began: 1.25.
  double epochs(int64_t draw) const;

 private:
  struct Segment {
    int64_t first;  // its first draw
    int64_t epoch;
    bool rest;  // what was left of one epoch; false: whole epochs, without an end
    std::shared_ptr<const RowIndex> index;
    double done;  // for a rest: the share of the epoch that was drawn before
  };

  const Segment& segment_of(int64_t draw) const;
  uint64_t key(const Segment& segment, int64_t epoch) const;

  uint64_t seed_;
  std::vector<Segment> segments_;
};

}  // namespace annulus
