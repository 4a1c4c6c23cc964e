// Finds which ranks hold positions of which spans, so that needs.cc and schedules.cc visit only pairs of ranks and
// slices that intersect. Internal to attention/plan.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "attention/plan/layout.h"

namespace annulus {

// Lists of numbers in CSR form; of(i) is list i.
class Lists {
 public:
  int64_t size() const { return static_cast<int64_t>(first_.size()) - 1; }
  std::span<const uint32_t> of(size_t i) const { return {items_.data() + first_[i], first_[i + 1] - first_[i]}; }
  void push_back(std::span<const uint32_t> items) {
    items_.insert(items_.end(), items.begin(), items.end());
    first_.push_back(items_.size());
  }

  // Returns, for each item 0, ..., n - 1, the ascending indices of the lists that contain it: {0, 2}, {2} becomes {0},
  // {}, {0, 1} for n = 3.
  Lists transposed(size_t n) const {
    Lists other;
    other.first_.assign(n + 1, 0);
    for (const uint32_t item : items_) ++other.first_[item + 1];
    std::partial_sum(other.first_.begin(), other.first_.end(), other.first_.begin());
    other.items_.resize(items_.size());
    std::vector<size_t> next(other.first_.begin(), other.first_.end() - 1);
    for (size_t i = 0; i + 1 < first_.size(); ++i) {
      for (const uint32_t item : of(i)) other.items_[next[item]++] = static_cast<uint32_t>(i);
    }
    return other;
  }

 private:
  std::vector<size_t> first_ = {0};
  std::vector<uint32_t> items_;
};

// The spans of all ranks of a layout, sorted by their first position.
class Holders {
 public:
  struct Held {
    Span span;
    int rank = 0;
    int64_t row = 0;       // the row in which the rank stores the span's first position
    int64_t furthest = 0;  // the largest position of this span and all before it in `held_`
  };

  explicit Holders(const Layout& layout) {
    for (int rank = 0; rank < layout.ranks(); ++rank) {
      int64_t row = 0;
      for (const Span& span : layout.spans[static_cast<size_t>(rank)]) {
        if (!span.empty()) held_.push_back({span, rank, row, 0});
        row += span.count;
      }
    }
    std::sort(held_.begin(), held_.end(), [](const Held& a, const Held& b) { return a.span.begin < b.span.begin; });
    int64_t furthest = -1;
    for (Held& h : held_) h.furthest = furthest = std::max(furthest, h.span.last());
  }

  // Calls visit(held) for every span whose range [begin, last()] intersects [from, to].
  template <typename Visit>
  void for_each(int64_t from, int64_t to, Visit visit) const {
    auto it = std::partition_point(held_.begin(), held_.end(), [&](const Held& h) { return h.furthest < from; });
    for (; it != held_.end() && it->span.begin <= to; ++it) {
      if (it->span.last() >= from) visit(*it);
    }
  }

  // Sets `ranks` to the ascending ranks that hold a member of `wanted` within [from, to].
  void find(const Span& wanted, int64_t from, int64_t to, std::vector<uint32_t>& ranks) const {
    ranks.clear();
    const Span part = wanted.clip(from, to);
    if (part.empty()) return;
    for_each(part.begin, part.last(), [&](const Held& h) {
      if (!intersect(part, h.span).empty()) ranks.push_back(static_cast<uint32_t>(h.rank));
    });
    std::sort(ranks.begin(), ranks.end());
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  }

 private:
  std::vector<Held> held_;  // by first position
};

}  // namespace annulus
