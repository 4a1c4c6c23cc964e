// The memory of this host as a source of a pool, on the NUMA nodes of the rank. A large block has pages of its own;
// small ones of a size class share chunks. So whatever goes back to the system is whole pages, and no mixture of sizes
// makes the process grow, as it would in a heap. Used by pool.cc. Needs no LibTorch.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <vector>

#include "memory/pool/block_source.h"

namespace annulus {

// Thread safe.
class HostMemorySource final : public BlockSource {
 public:
  // Blocks of at least so many bytes have pages of their own: huge ones, from 2 MiB on, if GLIBC_TUNABLES asks for them
  // (docs/explanation/performance.md, "Huge pages").
  static constexpr int64_t kOwnPages = 64 << 10;
  // The bytes of a chunk, and what its address is a multiple of. One empty chunk is kept.
  static constexpr int64_t kChunk = 1 << 20;

  HostMemorySource() = default;
  ~HostMemorySource() override;

  void* take(int64_t bytes) override;
  void give_back(void* block, int64_t bytes) override;

  // Binds pages that are taken from now on to these NUMA nodes, whichever thread touches them first; an empty list
  // binds none. Where the kernel refuses, pages have the binding of the thread that touches them first (memory/numa.h).
  void set_nodes(std::vector<int> nodes);

 private:
  struct Chunk;

  // The caller holds the lock.
  void* map(int64_t bytes, int64_t alignment) const;
  Chunk* make_chunk(int size_class);
  void add_to_open(Chunk& chunk);
  void remove_from_open(Chunk& chunk);

  std::mutex mutex_;  // of all below
  std::vector<int> nodes_;
  std::array<Chunk*, size_class(kOwnPages) + 1> open_{};  // by size class: the chunks with room for another block
  Chunk* spare_ = nullptr;
};

}  // namespace annulus
