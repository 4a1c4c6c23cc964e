// See pool.h.
#include "memory/pool/pool.h"

#include <pthread.h>

#include <atomic>
#include <optional>
#include <sstream>
#include <utility>

#include "common/environment.h"
#include "common/error.h"
#include "common/logging/log.h"
#include "common/text.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(begin, bytes) (static_cast<void>(begin), static_cast<void>(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(begin, bytes) (static_cast<void>(begin), static_cast<void>(bytes))
#endif

namespace annulus {

namespace {

struct PurposeEntry {
  std::string_view name, holds;
};
constexpr std::array<PurposeEntry, kPoolPurposes> kPurposes = {{
    {"travelling blocks",
     "keys, values, queries, results and gradients that ranks send each other in a call of attention"},
    {"lent blocks", "those that ranks of one host use without a copy"},
    {"gradients", "of the weights of a part of the model until they are summed, and what is received to be added"},
    {"kernel scratch", "what kernels of attention compute with"},
    {"staging", "buffers of memory.offload and optimizer.offload"},
    {"copies of a save", "what checkpoint.background writes while training goes on"},
}};

std::string text_of(const PoolBlock& block) {
  return "a block of " + std::string(name_of(block.purpose)) + " (" + with_commas(block.requested, "byte") + ")";
}

// Both lists are the same but for the names of their links.
void link(PoolBlock& block, PoolBlock*& newest, PoolBlock* PoolBlock::*newer, PoolBlock* PoolBlock::*older) {
  block.*newer = nullptr;
  block.*older = newest;
  if (newest != nullptr) newest->*newer = &block;
  newest = &block;
}
void unlink(PoolBlock& block, PoolBlock*& newest, PoolBlock* PoolBlock::*newer, PoolBlock* PoolBlock::*older) {
  if (block.*newer != nullptr) {
    block.*newer->*older = block.*older;
  } else {
    newest = block.*older;
  }
  if (block.*older != nullptr) block.*older->*newer = block.*newer;
}

}  // namespace

std::string_view name_of(PoolPurpose purpose) { return kPurposes[static_cast<size_t>(purpose)].name; }

double PoolStats::fragmentation() const {
  return peak == 0 ? 0 : static_cast<double>(peak - requested_at_peak) / static_cast<double>(peak);
}

std::atomic<Pool*> Pool::made = nullptr;

Pool::Pool(int64_t bound) : bound_(bound) { add(host_); }

Pool::~Pool() {
  const std::string left = in_use();
  if (!left.empty()) log_error("memory", "not returned to the pool at its end: " + left);
  remove(host_);
}

Pool& Pool::process() {
  // Never destroyed, because tensors may be freed at any time during the end of the process.
  static Pool& pool = *[] {
    made = new Pool(memory_from_environment("ANNULUS_POOL_MIB", kDefaultPoolBound));
    // A child that is forked while another thread has a lock could never take it.
    pthread_atfork(
        [] {
          made.load()->sources_mutex_.lock();
          made.load()->mutex_.lock();
        },
        [] {
          made.load()->mutex_.unlock();
          made.load()->sources_mutex_.unlock();
        },
        [] {
          made.load()->mutex_.unlock();
          made.load()->sources_mutex_.unlock();
        });
    return made.load();
  }();
  return pool;
}

std::string Pool::in_use_of_process() { return made != nullptr ? made.load()->in_use() : ""; }

void Pool::set_nodes(std::vector<int> nodes) {
  host_.set_nodes(std::move(nodes));
  trim();
}

void* Pool::get(int64_t bytes, PoolPurpose purpose, BlockSource* source) {
  void* const memory = try_get(bytes, purpose, source);
  if (memory == nullptr && bytes > 0) {
    throw Error(ErrorKind::kResource, "memory",
                "the system refuses " + with_commas(bytes, "byte") + " for " + std::string(name_of(purpose)) +
                    ", although the pool has given back its free blocks" + "; in use are " + in_use() +
                    ": a shorter context, fewer rows or more ranks take less");
  }
  return memory;
}

void* Pool::try_get(int64_t bytes, PoolPurpose purpose, BlockSource* source) {
  if (bytes < 0) {
    throw Error(ErrorKind::kInternal, "memory",
                std::to_string(bytes) + " bytes of " + std::string(name_of(purpose)) + " are asked for");
  }
  if (bytes == 0 || bytes > kMostBlockBytes) return nullptr;
  BlockSource& from = source != nullptr ? *source : host_;
  const int wanted = size_class(bytes);
  {
    const std::lock_guard lock(mutex_);
    if (PoolBlock* const block = free_block(from, wanted)) {
      ++stats_of(purpose).reused;
      give_out(*block, bytes, purpose);
      return block->memory;
    }
  }
  void* memory = from.take(class_bytes(wanted));
  if (memory == nullptr) {
    make_room(from);
    memory = from.take(class_bytes(wanted));
  }
  if (memory == nullptr) return nullptr;
  const std::lock_guard lock(mutex_);
  PoolBlock& block = blocks_[memory];
  block.memory = memory, block.source = &from, block.size_class = wanted;
  ++stats_of(purpose).taken;
  give_out(block, bytes, purpose);
  return memory;
}

void Pool::put(const void* block, PoolPurpose purpose) {
  if (block == nullptr) return;
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(block);
  if (found == blocks_.end()) refuse_foreign(block, purpose);
  PoolBlock& returned = found->second;
  if (returned.free) {
    throw Error(ErrorKind::kInternal, "memory", text_of(returned) + " is returned to the pool a second time");
  }
  if (returned.purpose != purpose) {
    throw Error(ErrorKind::kInternal, "memory",
                text_of(returned) + " is returned to the pool as one of " + std::string(name_of(purpose)));
  }
  stats_of(purpose).in_use -= returned.bytes();
  requested_[static_cast<size_t>(purpose)] -= returned.requested;
  keep(returned);
  shrink_to(bound_);
}

void Pool::refuse_foreign(const void* block, PoolPurpose purpose) const {
  std::ostringstream text;
  text << "memory at " << block << " is returned to the pool as " << name_of(purpose)
       << ", but the pool has not given it";
  for (const auto& [begin, other] : blocks_) {
    const auto *from = static_cast<const char*>(begin), *at = static_cast<const char*>(block);
    if (at > from && at < from + other.bytes()) text << ": it is inside of " << text_of(other);
  }
  throw Error(ErrorKind::kInternal, "memory", text.str());
}

void Pool::add(BlockSource& source) {
  const std::lock_guard sources(sources_mutex_);
  sources_.push_back(&source);
}

void Pool::remove(BlockSource& source) {
  const std::lock_guard sources(sources_mutex_);
  sources_.remove(&source);
  const std::lock_guard lock(mutex_);
  for (auto it = blocks_.begin(); it != blocks_.end();) {
    PoolBlock& block = it->second;
    ++it;  // give_back() removes the block
    if (block.source != &source) continue;
    if (block.free) {
      give_back(block);
      continue;
    }
    stats_of(block.purpose).in_use -= block.bytes();
    requested_[static_cast<size_t>(block.purpose)] -= block.requested;
    blocks_.erase(block.memory);
  }
}

int64_t Pool::bound() const {
  const std::lock_guard lock(mutex_);
  return bound_;
}

void Pool::set_bound(int64_t bytes) {
  if (bytes < 0) {
    throw Error(
        ErrorKind::kUsage, "memory",
        "free blocks of the pool: expected a number of bytes that is not negative, got " + std::to_string(bytes));
  }
  collect();
  const std::lock_guard lock(mutex_);
  bound_ = bytes;
  shrink_to(bound_);
}

void Pool::trim(int64_t bytes) {
  collect();
  const std::lock_guard lock(mutex_);
  shrink_to(bytes);
}

std::vector<PoolReport> Pool::reports() {
  collect();
  const std::lock_guard lock(mutex_);
  std::vector<PoolReport> reports;
  for (size_t p = 0; p < kPoolPurposes; ++p) reports.push_back({kPurposes[p].name, kPurposes[p].holds, stats_[p]});
  return reports;
}

std::string Pool::in_use() {
  collect();
  const std::lock_guard lock(mutex_);
  std::array<int64_t, kPoolPurposes> counts{};
  for (const auto& [memory, block] : blocks_) counts[static_cast<size_t>(block.purpose)] += block.free ? 0 : 1;
  std::string text;
  for (size_t p = 0; p < kPoolPurposes; ++p) {
    if (counts[p] == 0) continue;
    text += (text.empty() ? "" : ", ") + counted(counts[p], "block") + " of " + std::string(kPurposes[p].name) + " (" +
            with_commas(requested_[p], "byte") + ")";
  }
  return text;
}

PoolBlock* Pool::free_block(BlockSource& source, int size_class) {
  PoolBlock* const block = source.free_[static_cast<size_t>(size_class)];
  if (block == nullptr) return nullptr;
  unlink(*block, source.free_[static_cast<size_t>(size_class)], &PoolBlock::newer_alike, &PoolBlock::older_alike);
  if (oldest_ == block) oldest_ = block->newer;
  unlink(*block, newest_, &PoolBlock::newer, &PoolBlock::older);
  cached_ -= block->bytes();
  stats_of(block->purpose).cached -= block->bytes();
  return block;
}

void Pool::give_out(PoolBlock& block, int64_t bytes, PoolPurpose purpose) {
  block.free = false, block.purpose = purpose, block.requested = bytes;
  ASAN_UNPOISON_MEMORY_REGION(block.memory, static_cast<size_t>(bytes));
  int64_t& requested = requested_[static_cast<size_t>(purpose)];
  requested += bytes;
  PoolStats& stats = stats_of(purpose);
  stats.in_use += block.bytes();
  if (stats.in_use > stats.peak) stats.peak = stats.in_use, stats.requested_at_peak = requested;
}

void Pool::keep(PoolBlock& block) {
  block.free = true;
  ASAN_POISON_MEMORY_REGION(block.memory, static_cast<size_t>(block.bytes()));
  link(block, block.source->free_[static_cast<size_t>(block.size_class)], &PoolBlock::newer_alike,
       &PoolBlock::older_alike);
  link(block, newest_, &PoolBlock::newer, &PoolBlock::older);
  if (oldest_ == nullptr) oldest_ = &block;
  cached_ += block.bytes();
  stats_of(block.purpose).cached += block.bytes();
}

// Gives a free block back to its source and forgets it.
void Pool::give_back(PoolBlock& block) {
  unlink(block, block.source->free_[static_cast<size_t>(block.size_class)], &PoolBlock::newer_alike,
         &PoolBlock::older_alike);
  if (oldest_ == &block) oldest_ = block.newer;
  unlink(block, newest_, &PoolBlock::newer, &PoolBlock::older);
  cached_ -= block.bytes();
  stats_of(block.purpose).cached -= block.bytes();
  ASAN_UNPOISON_MEMORY_REGION(block.memory, static_cast<size_t>(block.bytes()));
  void* const memory = block.memory;
  block.source->give_back(memory, block.bytes());
  blocks_.erase(memory);
}

void Pool::shrink_to(int64_t bytes) {
  while (cached_ > bytes) give_back(*oldest_);
}

void Pool::make_room(BlockSource& source) {
  if (&source == &host_) return trim();
  source.collect();
  const std::lock_guard lock(mutex_);
  for (PoolBlock* const& newest : source.free_) {
    while (newest != nullptr) give_back(*newest);
  }
}

void Pool::collect() {
  const std::lock_guard sources(sources_mutex_);
  for (BlockSource* const source : sources_) source->collect();
}

}  // namespace annulus
