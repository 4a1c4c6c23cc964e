// The caches of a process: plans, patterns, compositions, rotary tables and data of the PyTorch operators. Each has a
// name and a share of one total. `annulus doctor` and the metrics of a run report their contents. A new cache is a line
// in the table in caches.cc and a NamedCache of that name beside the code that fills it; outside memory/ only tests may
// use ByteCache itself. Needs no LibTorch. Thread safe.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "memory/byte_cache.h"

namespace annulus {

// The default total size of all caches: 1,792 MiB.
constexpr int64_t kDefaultCacheTotal = int64_t{1792} << 20;

// A cache's entry in the table, and its current statistics.
struct CacheReport {
  std::string_view name;
  std::string_view holds;  // a description for users
  bool on_device = false;  // its values are on the compute device
  CacheStats stats;        // all zero except the capacity if the cache has not been used yet
};
// Returns the report of every cache, in the table's order.
std::vector<CacheReport> cache_reports();

// Returns the limit in bytes of all caches together: ANNULUS_CACHES_MIB or kDefaultCacheTotal until set_cache_total()
// is called. Raises Error(kUsage) if the variable is not a whole number from 0 to 1,048,576.
int64_t cache_total();
// Sets the limit in bytes of all caches together. Each cache gets its share and evicts the excess at once. With 0
// nothing is cached. Raises Error(kUsage) for a negative number. Called by `train` and `sample` with the key
// memory.caches.
void set_cache_total(int64_t bytes);
// Returns the part of `total` (bytes) that belongs to caches whose values are on the device.
int64_t cache_total_on_device(int64_t total);

// Registers a cache for the lifetime of this object. Part of NamedCache.
class CachePlace {
 public:
  using Stats = std::function<CacheStats()>;
  using SetCapacity = std::function<void(int64_t)>;

  // Gives the cache its share. Raises Error(kInternal) if the table lacks the name or another cache has it.
  CachePlace(std::string_view name, Stats stats, SetCapacity set_capacity);
  ~CachePlace();
  CachePlace(const CachePlace&) = delete;
  CachePlace& operator=(const CachePlace&) = delete;

 private:
  const std::string_view name_;
};

template <typename Value, typename Key = std::string>
class NamedCache : public ByteCache<Value, Key> {
 public:
  explicit NamedCache(std::string_view name)
      : ByteCache<Value, Key>(0),
        place_(
            name, [this] { return this->stats(); }, [this](int64_t bytes) { this->set_capacity(bytes); }) {}

 private:
  const CachePlace place_;
};

}  // namespace annulus
