// The caches of a process: for plans, patterns, compositions, rotary tables and the data that the operators for PyTorch
// read. Each has a name and a share of one total. `annulus doctor` and the metrics of a run show what they hold. A new
// cache is a line in the table in caches.cc and a NamedCache of that name beside the code that fills it; outside
// memory/ only tests may use ByteCache itself. Needs no LibTorch. Thread safe.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "memory/byte_cache.h"

namespace annulus {

// The default of the bytes that all caches may hold together: 1,792 MiB.
constexpr int64_t kDefaultCacheTotal = int64_t{1792} << 20;

// A cache's entry in the table, and what it holds now.
struct CacheReport {
  std::string_view name;
  std::string_view holds;  // a description for users
  bool on_device = false;  // its values are on the device that computes
  CacheStats stats;        // all zero except the capacity if the cache has not been used yet
};
// The report of every cache of the table, in the table's order.
std::vector<CacheReport> cache_reports();

// The bytes that all caches may hold together: ANNULUS_CACHES_MIB or kDefaultCacheTotal until set_cache_total() is
// called. Raises Error(kUsage) if the variable is not a whole number from 0 to 1,048,576.
int64_t cache_total();
// Sets the bytes that all caches may hold together. Each cache gets its share, and removes at once what exceeds it.
// With 0 no value is kept, so every value is made again. Raises Error(kUsage) for a negative number. Called by `train`
// and `sample` with the key memory.caches.
void set_cache_total(int64_t bytes);
// The part of a total in bytes that belongs to caches whose values are on the device.
int64_t cache_total_on_device(int64_t total);

// Registers a cache as long as this object exists. Part of NamedCache.
class CachePlace {
 public:
  using Stats = std::function<CacheStats()>;
  using SetCapacity = std::function<void(int64_t)>;

  // Gives the cache its share. Raises Error(kInternal) if the table does not have the name, or if another cache has it.
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
