// The pool: memory that is needed again and again in the same sizes, kept between its uses. Each step of a training run
// takes and returns blocks of the same sizes: keys and values that travel, gradients of a layer, scratch of kernels,
// buffers of files. From the second step on they come from here, without the system and without page faults.
//
// A free block is found by its size class (block_source.h), at the head of a list; no list is searched. Free blocks of
// all purposes and sources together take at most `bound` bytes: beyond it those that have been free for longest go back
// to the system. Blocks in use are not limited here: the memory plan of a run counts them
// (runtime/training/memory_plan.h), and states the bound beside them. If the system refuses memory, all free blocks go
// back to it, and it is asked once more.
//
// Tensors take memory through pool_tensor.h, lists through pool_vector.h. Needs no LibTorch.
//
// Thread safe. A forked child has a copy of the pool, which it may use.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <list>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "memory/pool/block_source.h"
#include "memory/pool/host_memory_source.h"

namespace annulus {

// What a block is used for, by which statistics are kept and errors name it.
enum class PoolPurpose { kTravelling, kLent, kGradients, kScratch, kStaging, kSaving };
constexpr size_t kPoolPurposes = 6;
std::string_view name_of(PoolPurpose purpose);  // "travelling blocks", ...

// All bytes are those of whole blocks, except where it says otherwise.
struct PoolStats {
  int64_t in_use = 0;
  int64_t cached = 0;             // free, and last used for this purpose
  int64_t peak = 0;               // the most that was in use at once
  int64_t requested_at_peak = 0;  // the bytes that were asked for of these
  int64_t taken = 0;              // blocks that were taken from the system so far
  int64_t reused = 0;             // requests that a free block has served so far

  // The share of the peak, from 0 to less than 1, that no request asked for: blocks are rounded up to a size class.
  double fragmentation() const;
};

struct PoolReport {
  std::string_view name;   // of the purpose
  std::string_view holds;  // a description for users
  PoolStats stats;
};

// A block of the pool, in use or free. Free blocks are in two lists: of their source and size class, and of all.
struct PoolBlock {
  void* memory = nullptr;
  BlockSource* source = nullptr;
  int size_class = 0;
  PoolPurpose purpose = PoolPurpose::kTravelling;  // that it is or was last used for
  bool free = false;
  int64_t requested = 0;                                     // bytes, of its last use
  PoolBlock *newer = nullptr, *older = nullptr;              // among all free blocks
  PoolBlock *newer_alike = nullptr, *older_alike = nullptr;  // among those of its source and class

  int64_t bytes() const { return class_bytes(size_class); }
};

class Pool {
 public:
  // `bound`: the bytes that free blocks may take.
  explicit Pool(int64_t bound);
  // Gives free blocks back. Blocks in use are a fault of their users, which is logged as an error that names them;
  // their memory stays valid.
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Returns the pool of this process, which is never destroyed. Its bound is ANNULUS_POOL_MIB, or kDefaultPoolBound,
  // until set_bound(). Raises Error(kUsage) if the variable is not a whole number from 0 to 1,048,576.
  static Pool& process();
  // Describes the blocks in use of that pool, like in_use(), without making it.
  static std::string in_use_of_process();
  // Binds blocks that are taken from now on to these NUMA nodes, and gives free ones back, which may lie on others. A
  // rank calls it for the process's pool when it binds its own memory (launcher/launch/rank_place.cc).
  void set_nodes(std::vector<int> nodes);

  // Returns an uninitialized block of at least `bytes`, aligned to kBlockAlignment; null if `bytes` is 0. `source` must
  // have been added; null means the host's memory. Raises Error(kResource) if the system refuses the memory even after
  // all free blocks (of another source: its own) have been given back to it, and Error(kInternal) for fewer than 0
  // bytes.
  void* get(int64_t bytes, PoolPurpose purpose, BlockSource* source = nullptr);
  // The same, but returns null in place of Error(kResource).
  void* try_get(int64_t bytes, PoolPurpose purpose, BlockSource* source = nullptr);
  // Takes a block back from get(); does nothing for null. Raises Error(kInternal), which names the block, if it is free
  // already, was given for another purpose, or was not given by this pool.
  void put(const void* block, PoolPurpose purpose);

  // Adds a source; remove() must be called before it ends.
  void add(BlockSource& source);
  // Gives the free blocks of a source back, and forgets those in use, which then belong to the source.
  void remove(BlockSource& source);

  int64_t bound() const;
  // Sets the bound, and gives back at once what is above it. Raises Error(kUsage) for a negative number.
  void set_bound(int64_t bytes);
  // Gives free blocks back, those that have been free for longest first, until the rest takes at most `bytes`.
  void trim(int64_t bytes = 0);

  // Returns the report of every purpose, in the order of PoolPurpose.
  std::vector<PoolReport> reports();
  // Describes the blocks in use, by purpose: "3 blocks of kernel scratch (1.2 MB)"; empty if there are none.
  std::string in_use();

 private:
  PoolBlock* free_block(BlockSource& source, int size_class);
  void give_out(PoolBlock& block, int64_t bytes, PoolPurpose purpose);
  void keep(PoolBlock& block);
  void give_back(PoolBlock& block);
  void shrink_to(int64_t bytes);
  void make_room(BlockSource& source);
  void collect();
  PoolStats& stats_of(PoolPurpose purpose) { return stats_[static_cast<size_t>(purpose)]; }
  [[noreturn]] void refuse_foreign(const void* block, PoolPurpose purpose) const;

  static std::atomic<Pool*> made;  // that of the process, once there is one

  std::mutex sources_mutex_;  // of sources_; taken before any other lock
  std::list<BlockSource*> sources_;
  HostMemorySource host_;

  mutable std::mutex mutex_;  // of all below, and of the lists of each source
  int64_t bound_;
  int64_t cached_ = 0;
  std::array<PoolStats, kPoolPurposes> stats_{};
  std::array<int64_t, kPoolPurposes> requested_{};     // of what is in use
  PoolBlock *newest_ = nullptr, *oldest_ = nullptr;    // of the free blocks, by when they were returned
  std::unordered_map<const void*, PoolBlock> blocks_;  // in use or free, by address
};

// The default bound on free blocks: 1,024 MiB.
constexpr int64_t kDefaultPoolBound = int64_t{1024} << 20;

}  // namespace annulus
