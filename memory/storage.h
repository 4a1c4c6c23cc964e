// Storage: numbered buffers with lifetimes in steps. One sweep over the lifetimes gives the peak, and which buffer
// reuses the storage of another. Used for the traffic of a plan (attention/plan/traffic.h), by which the executor
// allocates and frees storage, and for the memory plan of a training step (memory/charge.cc). Needs no LibTorch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <span>
#include <tuple>
#include <vector>

namespace annulus {

// The first and the last step in which a buffer is filled or used. Its storage is needed in [first, last].
struct Lifetime {
  int first = 0;
  int last = -1;

  bool empty() const { return last < first; }
  // Extends the lifetime so that it includes `step`.
  void use(int step) {
    if (empty()) first = last = step;
    first = std::min(first, step);
    last = std::max(last, step);
  }
  friend bool operator==(const Lifetime&, const Lifetime&) = default;
};

// A buffer and its lifetime. Steps are numbered from 0.
struct StoredBuffer {
  int64_t size = 0;  // in rows, elements or bytes, the same unit for all buffers of a pool
  int pool = 0;      // 0, 1, ...; only buffers of the same pool (same dtype and owner) reuse each other's storage
  Lifetime life;     // empty: the buffer needs no storage
};

// Example: buffers 0, 1 and 2 of one pool and of size 10 are needed in steps [0, 1], [1, 2] and [2, 3]. held() is 10,
// 20, 20, 10, peak() is 20, and successors() is {2, -1, -1}: buffer 2 reuses the storage of buffer 0.
//
// Thread compatible: a plain value.
class Storage {
 public:
  // Adds a buffer and returns its number: 0, 1, 2, ...
  int add(const StoredBuffer& buffer) {
    buffers_.push_back(buffer);
    return static_cast<int>(buffers_.size()) - 1;
  }
  const std::vector<StoredBuffer>& buffers() const { return buffers_; }

  // Returns the storage needed in each step, up to the last that needs any. A unit of pool p counts weights[p]: its
  // bytes, or 0 to leave the pool out.
  std::vector<int64_t> held(std::span<const int64_t> weights) const {
    int steps = 0;
    for (const StoredBuffer& b : buffers_) steps = std::max(steps, b.life.last + 1);
    std::vector<int64_t> change(static_cast<size_t>(steps) + 1);  // begins with a step minus ended before it
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
  // Returns the maximum of held().
  int64_t peak(std::span<const int64_t> weights) const {
    int64_t most = 0;
    for (const int64_t in_step : held(weights)) most = std::max(most, in_step);
    return most;
  }

  // Returns, for each buffer, the buffer that reuses its storage, or -1. The successor has the same pool and size, and
  // its lifetime begins in the step after the buffer's last. So code that passes storage on at once, and frees it where
  // there is no successor, never holds more than peak().
  std::vector<int> successors() const {
    std::map<std::tuple<int, int, int64_t>, std::vector<int>> ended;  // by next step, pool and size; descending
    for (size_t b = buffers_.size(); b-- > 0;) {
      const StoredBuffer& buffer = buffers_[b];
      if (buffer.life.empty()) continue;
      ended[{buffer.life.last + 1, buffer.pool, buffer.size}].push_back(static_cast<int>(b));
    }
    std::vector<int> successors(buffers_.size(), -1);
    for (size_t b = 0; b < buffers_.size(); ++b) {
      const StoredBuffer& buffer = buffers_[b];
      if (buffer.life.empty()) continue;
      const auto found = ended.find({buffer.life.first, buffer.pool, buffer.size});
      if (found == ended.end() || found->second.empty()) continue;
      successors[static_cast<size_t>(found->second.back())] = static_cast<int>(b);
      found->second.pop_back();
    }
    return successors;
  }

 private:
  std::vector<StoredBuffer> buffers_;
};

}  // namespace annulus
