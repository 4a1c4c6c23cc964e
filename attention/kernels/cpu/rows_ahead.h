// Software prefetch of rows while flash attention on CPUs computes scores. Used by flash.cc.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "attention/kernels/cpu/flash.h"
#include "attention/kernels/cpu/key_chunks.h"

namespace annulus::cpu_flash {

// Prefetches the rows that will be needed soon, a few at a time, because more at once would stall the processor. The
// rows of one head are not adjacent, and a pattern's keys may lie anywhere, so the hardware prefetcher cannot predict
// them.
template <typename T>
class RowsAhead {
 public:
  // Prefetches the rows of `parts`, the next chunk of keys, evenly over `times` calls of scores_of, with the rows of
  // their gradients if `backward`.
  RowsAhead(std::span<const Part<T>> parts, int64_t dim, bool backward, int64_t times)
      : parts_(parts), dim_(dim), backward_(backward) {
    if (!parts.empty() && times > 0) of_call_ = ceil_div(columns_of(parts), times);
  }

  // Queues rows first, ..., past - 1 for the next call of scores_of.
  void add(const StoredRows& rows, int64_t first, int64_t past) {
    if (first >= past) return;
    const int64_t width = width_of(rows.storage);
    soon_.push_back(
        {static_cast<const char*>(from_row(rows, first).data), rows.step * width, dim_ * width, past - first});
    soon_rows_ += past - first;
  }

  // Begins a call of scores_of that will call fetch() `calls` times.
  void begin(int64_t calls) {
    share_ = share(of_call_, calls);
    soon_share_ = share(soon_rows_, calls);
  }

  // Prefetches the next rows, without waiting.
  void fetch() {
    for (int64_t n = 0; n < share_ && part_ < parts_.size(); ++n) {
      const Part<T>& part = parts_[part_];
      const int64_t row = part.first + row_, bytes = dim_ * static_cast<int64_t>(sizeof(T));
      fetch_row<2>(from_row(part.piece->k, row).data, dim_ * width_of(part.piece->k.storage));
      fetch_row<2>(from_row(part.piece->v, row).data, dim_ * width_of(part.piece->v.storage));
      if (backward_) {
        fetch_row<2>(part.piece->dk.at(row), bytes);
        fetch_row<2>(part.piece->dv.at(row), bytes);
      }
      if (++row_ == part.count()) row_ = 0, ++part_;
    }
    for (int64_t n = 0; n < soon_share_ && !soon_.empty(); ++n) {
      Soon& rows = soon_.back();
      fetch_row<3>(rows.next, rows.bytes);
      rows.next += rows.step, --soon_rows_;
      if (--rows.count == 0) soon_.pop_back();
    }
  }

 private:
  // Avoids a division, which is slow, where possible.
  static int64_t share(int64_t rows, int64_t calls) {
    return rows > calls ? ceil_div(rows, calls) : static_cast<int64_t>(rows > 0);
  }

  struct Soon {
    const char* next;
    int64_t step, bytes, count;
  };

  // Prefetches a row into the L1 (3) or L2 cache (2). Must be inlined: GCC treats a function that only prefetches as
  // free of side effects, and drops its calls.
  template <int kLocality>
  [[gnu::always_inline]] static void fetch_row(const void* row, int64_t bytes) {
    constexpr int64_t kLine = 64;
    for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(static_cast<const char*>(row) + i, 0, kLocality);
  }

  std::span<const Part<T>> parts_;
  int64_t dim_;
  bool backward_;
  int64_t of_call_ = 0, share_ = 0;  // rows of keys per call of scores_of, and of fetch()
  size_t part_ = 0;
  int64_t row_ = 0;
  std::vector<Soon> soon_;
  int64_t soon_rows_ = 0, soon_share_ = 0;
};

// Computes the scores of n rows with the columns of `runs` (TileMath::scores) panel by panel, and prefetches rows in
// between.
template <typename T>
void scores_of(const TileMath<T>& math, int64_t n, const T* a, int64_t a_step, const T* panels, int64_t length,
               const std::vector<Run>& runs, T* s, int64_t s_step, RowsAhead<T>& ahead) {
  int64_t calls = 0;
  for (const Run& run : runs) calls += ceil_div(run.past, math.panel) - run.first / math.panel;
  ahead.begin(calls);
  for (const Run& run : runs) {
    for (int64_t c = run.first; c < run.past;) {
      const int64_t past = std::min(run.past, c / math.panel * math.panel + math.panel);
      math.scores(n, a, a_step, panels, length, {c, past}, s, s_step);
      ahead.fetch();
      c = past;
    }
  }
}

}  // namespace annulus::cpu_flash
