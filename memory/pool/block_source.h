// Where a pool takes memory from: ordinary memory of this process (host_memory_source.h), or memory that processes lend
// to each other (shared_memory.h); and the sizes of its blocks, eight for each doubling. Used by pool.cc, which keeps
// the free blocks of each source and size apart. Needs no LibTorch.
#pragma once

#include <array>
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

struct PoolBlock;

class BlockSource {
 public:
  BlockSource() = default;
  virtual ~BlockSource() = default;
  BlockSource(const BlockSource&) = delete;
  BlockSource& operator=(const BlockSource&) = delete;

  // Takes a block of exactly these bytes from the system, aligned to kBlockAlignment; null if the system refuses. The
  // pool calls it without its lock, so several threads may be in it at once.
  virtual void* take(int64_t bytes) = 0;
  // Gives a block back to the system. The pool calls it with its lock held, so it must not call the pool.
  virtual void give_back(void* block, int64_t bytes) = 0;
  // Returns blocks to the pool that have become free without a call of it. Called before the pool reports or trims,
  // with no lock held that put() takes.
  virtual void collect() {}

 private:
  friend class Pool;
  std::array<PoolBlock*, kSizeClasses> free_{};  // by size class: the free block that was used last
};

}  // namespace annulus
