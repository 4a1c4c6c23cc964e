// Storage: numbered buffers, each needed from one step to another. One sweep over their lives says how much is held at
// most at once, and which buffer takes over whose storage. Used for a plan's traffic (attention/plan/traffic.h), for
// the memory plan of a training step, and by the execution, which takes and frees storage by it. Needs no LibTorch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <span>
#include <tuple>
#include <vector>

namespace annulus {

// The first and the last step in which a buffer holds something or is filled: its storage is needed in [first, last].
struct Lifetime {
  int first = 0;
  int last = -1;

  bool empty() const { return last < first; }
  // Makes it include `step`.
  void use(int step) {
    if (empty()) first = last = step;
    first = std::min(first, step);
    last = std::max(last, step);
  }
  friend bool operator==(const Lifetime&, const Lifetime&) = default;
};

// Steps are numbered from 0.
struct StoredBuffer {
  int64_t size = 0;  // in a unit that is one for the whole pool: rows, elements or bytes
  int pool = 0;      // 0, 1, ...: storage is taken over only within a pool, whose buffers are alike in dtype and owner
  Lifetime life;     // may be empty: it needs no storage
};

// Thread safety: a plain value.
class Storage {
 public:
  // The number of the new buffer: 0, 1, 2, ...
  int add(const StoredBuffer& buffer) {
    buffers_.push_back(buffer);
    return static_cast<int>(buffers_.size()) - 1;
  }
  const std::vector<StoredBuffer>& buffers() const { return buffers_; }

  // What is needed in each step, up to the last in which anything is, where one unit of pool p counts weights[p]: its
  // bytes, or 0 to leave a pool out.
  std::vector<int64_t> held(std::span<const int64_t> weights) const {
    int steps = 0;
    for (const StoredBuffer& b : buffers_) steps = std::max(steps, b.life.last + 1);
    std::vector<int64_t> change(static_cast<size_t>(steps) + 1);  // what begins with a step, less what ended before it
    for (const StoredBuffer& b : buffers_) {
      if (b.life.empty()) continue;
      const int64_t weighted = b.size * weights[static_cast<size_t>(b.pool)];
      change[static_cast<size_t>(b.life.first)] += weighted;
      change[static_cast<size_t>(b.life.last) + 1] -= weighted;
    }
    change.pop_back();
    int64_t held = 0;
    for (int64_t& in_step : change) in_step = held += in_step;
    return change;
  }
  // The most of it that is needed at once.
  int64_t peak(std::span<const int64_t> weights) const {
    int64_t most = 0;
    for (const int64_t in_step : held(weights)) most = std::max(most, in_step);
    return most;
  }

  // For each buffer the one that takes its storage over, or -1: one of the same pool and size whose life begins with
  // the step after. Nothing is kept in between, so whoever frees what nobody takes over holds no more than peak().
  std::vector<int> heirs() const {
    std::map<std::tuple<int, int, int64_t>, std::vector<int>> ended;  // by the step after it, pool, size; descending
    for (size_t b = buffers_.size(); b-- > 0;) {
      const StoredBuffer& buffer = buffers_[b];
      if (buffer.life.empty()) continue;
      ended[{buffer.life.last + 1, buffer.pool, buffer.size}].push_back(static_cast<int>(b));
    }
    std::vector<int> heirs(buffers_.size(), -1);
    for (size_t b = 0; b < buffers_.size(); ++b) {
      const StoredBuffer& buffer = buffers_[b];
      if (buffer.life.empty()) continue;
      const auto found = ended.find({buffer.life.first, buffer.pool, buffer.size});
      if (found == ended.end() || found->second.empty()) continue;
      heirs[static_cast<size_t>(found->second.back())] = static_cast<int>(b);
      found->second.pop_back();
    }
    return heirs;
  }

 private:
  std::vector<StoredBuffer> buffers_;
};

}  // namespace annulus
