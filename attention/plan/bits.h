// Bit sets of rows or positions, 64 bits per word: setting, counting, and conversion to spans. Internal to
// attention/plan (needs.cc).
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>

#include "attention/pattern/span.h"

namespace annulus {

inline void set_bits(std::span<uint64_t> words, int64_t first, int64_t stride, int64_t count) {
  if (stride != 1) {
    for (int64_t i = 0, bit = first; i < count; ++i, bit += stride) {
      words[static_cast<size_t>(bit >> 6)] |= uint64_t{1} << (bit & 63);
    }
    return;
  }
  for (int64_t bit = first, past = first + count; bit < past;) {
    const int64_t n = std::min(past - bit, 64 - (bit & 63));
    const uint64_t mask = n == 64 ? ~uint64_t{0} : ((uint64_t{1} << n) - 1) << (bit & 63);
    words[static_cast<size_t>(bit >> 6)] |= mask;
    bit += n;
  }
}

inline int64_t count_bits(std::span<const uint64_t> words) {
  int64_t n = 0;
  for (const uint64_t word : words) n += word == ~uint64_t{0} ? 64 : word == 0 ? 0 : std::popcount(word);
  return n;
}

// Counts the set bits among the members of `span`.
inline int64_t count_bits(std::span<const uint64_t> words, const Span& span) {
  int64_t n = 0;
  for (int64_t i = 0; i < span.count; ++i) n += words[static_cast<size_t>(span.at(i) >> 6)] >> (span.at(i) & 63) & 1;
  return n;
}

// Returns the first bit in [from, past) that is set (flip = 0) or clear (flip = all ones); `past` if there is none.
inline int64_t next_bit(std::span<const uint64_t> words, int64_t from, int64_t past, uint64_t flip = 0) {
  while (from < past) {
    const uint64_t word = (words[static_cast<size_t>(from >> 6)] ^ flip) >> (from & 63);
    if (word != 0) return std::min(past, from + std::countr_zero(word));
    from = (from | 63) + 1;
  }
  return past;
}

// Calls visit(span) for ascending spans that cover the set bits in [begin, past), found greedily. A progression of only
// two bits is split, because the second may begin a longer span: bits 0, 3, 4, 5 give [0] and [3..5].
template <typename Visit>
void for_each_span(std::span<const uint64_t> words, int64_t begin, int64_t past, Visit visit) {
  for (int64_t first = next_bit(words, begin, past); first < past;) {
    int64_t next = next_bit(words, first + 1, past);
    if (next == past) {
      visit(Span{first, 1, 1});
      return;
    }
    const int64_t stride = next - first;
    int64_t count = 2;
    if (stride == 1) {
      const int64_t end = next_bit(words, next, past, ~uint64_t{0});
      count = end - first;
      next = next_bit(words, end, past);
    } else {
      for (int64_t last = next;; ++count, last = next) {
        next = next_bit(words, last + 1, past);
        if (next - last != stride || next == past) break;
      }
      if (count == 2 && next < past) {
        visit(Span{first, 1, 1});
        first += stride;
        continue;
      }
    }
    visit(Span{first, stride, count});
    first = next;
  }
}

}  // namespace annulus
