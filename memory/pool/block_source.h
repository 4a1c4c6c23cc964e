// Where a pool takes memory from: ordinary memory of this process (host_memory_source.h), or memory that processes lend
// to each other (shared_memory.h). Used by pool.cc, which keeps the free blocks of each source apart. Needs no
// LibTorch.
#pragma once

#include <array>
#include <cstdint>

#include "memory/pool/size_classes.h"

namespace annulus {

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
