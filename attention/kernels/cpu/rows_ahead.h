// Fetches rows into the caches before flash attention on CPUs needs them, while it computes scores. Used by flash.cc.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "attention/kernels/cpu/flash.h"
#include "attention/kernels/cpu/key_chunks.h"

namespace annulus::cpu_flash {

// The rows that will be needed soon. They are fetched a few at a time, because more of them at once would keep the
// processor waiting. The rows of one head are not adjacent, and a pattern's keys may lie anywhere, so the processor
// does not foresee which rows come next.
template <typename T>
class RowsAhead {
 public:
  // `parts` are those of the next chunk of keys, whose rows are fetched evenly in `times` calls of scores_of. With
  // `backward` the rows of the gradients are fetched as well.
  RowsAhead(std::span<const Part<T>> parts, int64_t dim, bool backward, int64_t times)
      : parts_(parts), dim_(dim), backward_(backward) {
    if (!parts.empty() && times > 0) of_call_ = ceil_div(columns_of(parts), times);
  }

  // Rows first, ..., past - 1 will be fetched in the next call of scores_of.
  void add(const StoredRows& rows, int64_t first, int64_t past) {
    if (first >= past) return;
    const int64_t width = width_of(rows.storage);
    soon_.push_back(
        {static_cast<const char*>(from_row(rows, first).data), rows.step * width, dim_ * width, past - first});
    soon_rows_ += past - first;
  }

  // A call of scores_of begins, in which fetch() will be called `calls` times.
  void begin(int64_t calls) {
    share_ = share(of_call_, calls);
    soon_share_ = share(soon_rows_, calls);
  }

  // Fetches the next rows. The processor does not wait for them.
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
  // Without a division where it is not needed, because a division takes long.
  static int64_t share(int64_t rows, int64_t calls) {
    return rows > calls ? ceil_div(rows, calls) : static_cast<int64_t>(rows > 0);
  }

  struct Soon {
    const char* next;
    int64_t step, bytes, count;
  };

  // Fetches a row into the first-level cache (3) or the second-level one (2). It must be inlined: GCC takes a function
  // that only fetches for one without effects, and leaves out its calls.
  template <int kLocality>
  [[gnu::always_inline]] static void fetch_row(const void* row, int64_t bytes) {
    constexpr int64_t kLine = 64;
    for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(static_cast<const char*>(row) + i, 0, kLocality);
  }

  std::span<const Part<T>> parts_;
  int64_t dim_;
  bool backward_;
  int64_t of_call_ = 0, share_ = 0;  // rows of keys that are fetched in a call of scores_of, and of fetch()
  size_t part_ = 0;
  int64_t row_ = 0;
  std::vector<Soon> soon_;
  int64_t soon_rows_ = 0, soon_share_ = 0;
};

// The scores of n rows with the columns of `runs` (TileMath::scores), one panel at a time, between which rows are
// fetched.
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
