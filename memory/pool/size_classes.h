// Size classes: the sizes of the blocks of a pool, eight for each doubling. Used by pool.cc. The class of a request and
// the size of a class come from a few operations on bits, without a table or a search. Needs no LibTorch. Thread safe:
// no state.
#pragma once

#include <bit>
#include <cstdint>

namespace annulus {

// Blocks begin at multiples of this, as LibTorch's tensors on CPUs do, and their sizes are multiples of it.
constexpr int64_t kBlockAlignment = 64;
// The largest block, more than any process can address.
constexpr int64_t kMostBlockBytes = int64_t{1} << 47;

// Returns the class of the smallest blocks that hold `bytes`, from 1 to kMostBlockBytes. Classes are numbered from 0 by
// their size.
constexpr int size_class(int64_t bytes) {
  const auto last =
      static_cast<uint64_t>((bytes - 1) / kBlockAlignment);  // the unit of 64 bytes that the last byte is in
  if (last < 16) return static_cast<int>(last);
  const int shift = std::bit_width(last) - 4;
  return 8 * shift + static_cast<int>(last >> shift);
}

constexpr int kSizeClasses = size_class(kMostBlockBytes) + 1;

// Returns the size in bytes of the blocks of a class. It is less than 1.125 times the smallest request of the class, or
// less than 64 bytes more than that.
constexpr int64_t class_bytes(int size_class) {
  if (size_class < 16) return (size_class + 1) * kBlockAlignment;
  const int shift = size_class / 8 - 1;
  return (int64_t{size_class % 8 + 9} << shift) * kBlockAlignment;
}

}  // namespace annulus
