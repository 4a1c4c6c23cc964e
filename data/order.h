// SourceOrder: which row of a source is drawn when. Used by the dataset: every rank computes the same from the number
// of a draw alone.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/permutation.h"
#include "data/row_index.h"

namespace annulus {

// Draws are numbered from 0 over the whole run. Each epoch takes every training row once, in an order of its own, in
// O(1) memory. Thread-safe where change() is not being called.
class SourceOrder {
 public:
  // source: its name, so that sources of the same length have orders of their own. Raises Error(kInput) where the index
  // has no training row.
  SourceOrder(int64_t seed, std::string_view source, std::shared_ptr<const RowIndex> index);

  struct Drawn {
    const RowIndex* index;  // lives as long as this order
    int64_t row;            // of its training part
    int64_t epoch;          // from 0
  };
  Drawn at(int64_t draw) const;

  // From this draw on rows are those of `index`, with another context: first what is left of the epoch, packed anew
  // with its settings (in memory where `folder` is empty, else found there or made), then whole epochs. Later changes
  // are forgotten. The epoch's tokens that were a target before are none again, the others are once.
  void change(int64_t draw, std::shared_ptr<const RowIndex> index, const std::string& folder = "",
              FileSystem& files = FileSystem::real());

  // Epochs that the draws before this one have completed, and the share of the one that they began: 1.25.
  double epochs(int64_t draw) const;

 private:
  struct Segment {
    int64_t first;  // draw
    int64_t epoch;
    bool rest;  // what was left of one epoch; else whole epochs, without an end
    std::shared_ptr<const RowIndex> index;
    double done;  // share of the epoch that was drawn before: of a rest
  };

  const Segment& segment_of(int64_t draw) const;
  uint64_t key(const Segment& segment, int64_t epoch) const;

  uint64_t seed_;
  std::vector<Segment> segments_;
};

}  // namespace annulus
