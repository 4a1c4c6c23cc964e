// TaskDraws: the random numbers of a prompt. Used by the files that make tasks (task.h).
#pragma once

#include <cstdint>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "common/splitmix64.h"

namespace annulus {

// A sequence of splitmix64, and others that are independent of it. The same arguments give the same numbers everywhere.
// Length and depth are not among them, so a prompt asks for the same keys at each, and the cells of a grid differ in
// nothing else.
class TaskDraws {
 public:
  TaskDraws(uint64_t seed, std::string_view task, int64_t sample) : key_(splitmix64(seed)) {
    for (const char c : task) mix(static_cast<unsigned char>(c));
    mix(static_cast<uint64_t>(sample));
    state_ = key_;
  }

  // Another sequence. What a prompt draws for itself and what it draws for its haystack are different ones, so that
  // the first does not change while the haystack's size is sought.
  TaskDraws stream(uint64_t number) const {
    TaskDraws other = *this;
    other.mix(number);
    other.state_ = other.key_;
    return other;
  }

  uint64_t bits() {
    const uint64_t result = splitmix64(state_);
    state_ += kSplitmix64Step;
    return result;
  }

  // Each of 0 .. n-1 with the same probability; n >= 1.
  int64_t below(int64_t n) {
    const auto m = static_cast<uint64_t>(n);
    const uint64_t uneven = (0 - m) % m;  // 2^64 mod m: numbers below it would make the small results more frequent
    uint64_t x = bits();
    while (x < uneven) x = bits();
    return static_cast<int64_t>(x % m);
  }

  template <typename T>
  void shuffle(std::vector<T>& items) {
    for (size_t i = items.size(); i > 1; --i) {
      std::swap(items[i - 1], items[static_cast<size_t>(below(static_cast<int64_t>(i)))]);
    }
  }

  // `count` different ones of 0 .. n-1, in the order drawn. For a count that is small beside n, or small itself.
  std::vector<int64_t> distinct(int64_t n, int64_t count) {
    std::vector<int64_t> drawn;
    std::unordered_set<int64_t> seen;
    while (static_cast<int64_t>(drawn.size()) < count) {
      const int64_t x = below(n);
      if (seen.insert(x).second) drawn.push_back(x);
    }
    return drawn;
  }

 private:
  void mix(uint64_t word) { key_ = splitmix64(key_ ^ word); }

  uint64_t key_, state_ = 0;
};

}  // namespace annulus
