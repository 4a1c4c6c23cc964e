// Tests that the C library keeps freed memory for later allocations.
#include "memory/freed_memory.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace annulus::freed_memory_test {
namespace {

constexpr size_t kBlock = size_t{16} << 20;

// Allocates, writes and frees a block. Returns the bytes in separate mappings while it exists, and the free bytes of
// the heap afterwards.
std::pair<size_t, size_t> mapped_and_kept() {
  const size_t before = mallinfo2().hblkhd;
  void* const block = std::malloc(kBlock);
  std::memset(block, 1, kBlock);
  const size_t mapped = mallinfo2().hblkhd - before;
  EXPECT_EQ(static_cast<const char*>(block)[kBlock - 1], 1);
  std::free(block);
  return {mapped, mallinfo2().fordblks};
}

TEST(FreedMemory, IsKeptInsteadOfReturnedToTheKernel) {
  mallopt(M_MMAP_THRESHOLD, 128 << 10);  // glibc's default, which frees no longer change
  const auto [mapped, kept] = mapped_and_kept();
  EXPECT_GE(mapped, kBlock);
  EXPECT_LT(kept, kBlock);
  keep_freed_memory();
  const auto [mapped_now, kept_now] = mapped_and_kept();
  EXPECT_EQ(mapped_now, 0U);
  EXPECT_GE(kept_now, kBlock);
  const size_t heap = mallinfo2().arena;
  EXPECT_EQ(mapped_and_kept().first, 0U);
  EXPECT_EQ(mallinfo2().arena, heap);  // the same block again
}

}  // namespace
}  // namespace annulus::freed_memory_test
