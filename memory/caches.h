// The caches of a process: each has a name and a share of one total, and `annulus doctor` and a run's metrics show what
// they hold. Of plans, patterns, compositions, rotary tables and what the operators for PyTorch read. A new cache is a
// line in the table in caches.cc and a NamedCache of that name beside the code that fills it; ByteCache itself is not
// visible outside memory/ but to tests. Needs no LibTorch. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "memory/byte_cache.h"

namespace annulus {

// Bytes that all caches may hold together where nobody says otherwise: 1,792 MiB.
constexpr int64_t kDefaultCacheTotal = int64_t{1792} << 20;

// What the table says of a cache, and what it holds now.
struct CacheReport {
  std::string_view name;
  std::string_view holds;  // in words
  bool on_device = false;  // its values lie on the device that computes, a GPU where there is one
  CacheStats stats;        // zeros but for the capacity where nobody has used it yet
};
// Of every cache of the table, in its order.
std::vector<CacheReport> cache_reports();

// Bytes. The environment's ANNULUS_CACHES_MIB or kDefaultCacheTotal until set_cache_total is called. Raises
// Error(kUsage) where the variable is no whole number from 0 to 1,048,576.
int64_t cache_total();
// Each cache gets its share, and lets go at once of what is more. 0: nothing is kept, every value is made anew. Raises
// Error(kUsage) for a negative number. Called by `train` and `sample` with the key memory.caches.
void set_cache_total(int64_t bytes);
// The part of a total that is for caches whose values lie on the device.
int64_t cache_total_on_device(int64_t total);

// A cache's entry in the registry, as long as it lives. Part of NamedCache.
class CachePlace {
 public:
  using Stats = std::function<CacheStats()>;
  using SetCapacity = std::function<void(int64_t)>;

  // Gives the cache its share. Raises Error(kInternal) for a name that the table lacks, or that is taken.
  CachePlace(std::string_view name, Stats stats, SetCapacity set_capacity);
  ~CachePlace();
  CachePlace(const CachePlace&) = delete;
  CachePlace& operator=(const CachePlace&) = delete;

 private:
  const std::string_view name_;
};

template <typename Value>
class NamedCache : public ByteCache<Value> {
 public:
  explicit NamedCache(std::string_view name)
      : ByteCache<Value>(0),
        place_(
            name, [this] { return this->stats(); }, [this](int64_t bytes) { this->set_capacity(bytes); }) {}

 private:
  const CachePlace place_;
};

}  // namespace annulus
