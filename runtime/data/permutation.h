// KeyedPermutation: the numbers below n in an order that looks random, in O(1) memory. Used by SourceOrder and RowIndex
// for the order in which rows are drawn.
#pragma once

#include <array>
#include <cstdint>

namespace annulus {

// A Feistel network over the next power of four. A result that is not below n is sent through it again (cycle walking),
// so at() takes each value below n once. The same n and key give the same order everywhere. Thread-safe.
class KeyedPermutation {
 public:
  KeyedPermutation(int64_t n, uint64_t key);

  int64_t size() const { return n_; }
  int64_t at(int64_t i) const;  // 0 <= i < n

 private:
  static constexpr int kRounds = 6;

  int64_t n_;
  int half_ = 1;  // bits of each half
  std::array<uint64_t, kRounds> keys_{};
};

}  // namespace annulus
