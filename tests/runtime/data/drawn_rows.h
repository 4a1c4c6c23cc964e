// Lengths of documents, and what the rows of a dataset hold, worked out from their tokens. Used by dataset_test.cc,
// whose shards hold each id once (except the end of a document), so that an id identifies a token.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <vector>

#include "runtime/data/dataset.h"
#include "tests/runtime/data/whole_rows.h"

namespace annulus {

constexpr int64_t kEnd = 0;  // the id that ends every document

inline std::vector<int64_t> some_lengths(int64_t documents, uint32_t seed) {
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < documents; ++i) {
    seed = seed * 1664525 + 1013904223;
    lengths.push_back(1 + (seed >> 24) % 60);  // length 1 is an empty document with its end
  }
  return lengths;
}

inline int64_t sum(const std::vector<int64_t>& numbers) {
  return std::accumulate(numbers.begin(), numbers.end(), int64_t{0});
}

// The lengths of the documents' parts in a row, padding last, as its tokens show them: a document ends with kEnd, or
// with a token whose target is not the next input.
inline std::vector<int64_t> parts_by_tokens(const Row& row) {
  std::vector<int64_t> parts;
  for (size_t i = 0; i < row.tokens.size(); ++i) {
    const bool padding = row.targets[i] == kNoTarget;
    const bool goes_on = i > 0 && (padding ? row.targets[i - 1] == kNoTarget
                                           : row.tokens[i - 1] != kEnd && row.targets[i - 1] == row.tokens[i]);
    if (!goes_on) parts.push_back(0);
    ++parts.back();
  }
  return parts;
}

// How often each id except kEnd was a target in steps [begin, end).
inline std::map<int64_t, int64_t> targets(const Dataset& data, int64_t begin, int64_t end) {
  std::map<int64_t, int64_t> counts;
  for (int64_t step = begin; step < end; ++step) {
    std::vector<SourceUse> uses(data.sources());
    for (int64_t r = 0; r < data.rows(step); ++r) {
      const Row row = whole_row(data, step, r);
      EXPECT_EQ(static_cast<int64_t>(row.tokens.size()), data.context(step));
      EXPECT_EQ(data.drawn(step, r).parts().lengths, parts_by_tokens(row)) << "step " << step << ", row " << r;
      SourceUse& use = uses[data.drawn(step, r).source];
      const auto padding = std::count(row.targets.begin(), row.targets.end(), kNoTarget);
      ++use.rows;
      use.targets += data.context(step) - padding;
      use.documents += static_cast<int64_t>(parts_by_tokens(row).size()) - (padding > 0 ? 1 : 0);
      for (size_t i = 0; i < row.targets.size(); ++i) {
        if (row.targets[i] == kNoTarget || row.targets[i] == kEnd) continue;
        ++counts[row.targets[i]];
        // Ids are consecutive within a document.
        if (row.tokens[i] != kEnd) {
          EXPECT_EQ(row.tokens[i] + 1, row.targets[i]);
        }
      }
    }
    EXPECT_EQ(data.uses(step), uses) << "step " << step;
  }
  return counts;
}

}  // namespace annulus
