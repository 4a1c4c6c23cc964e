// An LRU cache of bounded size in bytes. Its keys are texts, or values of a type with operator==, `uint64_t hash()` and
// `int64_t bytes()`. If several threads request a value at the same time, one makes it and the others wait. Used by
// memory/caches.h. Thread safe.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <unordered_map>

namespace annulus {

struct CacheStats {
  int64_t hits = 0;
  int64_t misses = 0;  // requests that made a value
  int64_t evictions = 0;
  int64_t too_large = 0;  // values larger than the cache, which each request makes again
  int64_t entries = 0;
  int64_t bytes = 0;
  int64_t capacity = 0;  // bytes
};

template <typename Value, typename Key = std::string>
class ByteCache {
 public:
  explicit ByteCache(int64_t capacity) { stats_.capacity = capacity; }

  // Returns the cached value of `key`, or makes it with make() -> Value and caches it. bytes(value) -> int64_t is the
  // memory that it takes. A value larger than the cache is returned but not cached. Exceptions of make() or bytes()
  // propagate to the caller and to the threads that wait for the value, and nothing is cached.
  template <typename Make, typename Bytes>
  std::shared_ptr<const Value> get(const Key& key, const Make& make, const Bytes& bytes) {
    std::unique_lock lock(mutex_);
    std::shared_ptr<Entry> entry;
    if (const auto found = index_.find(key); found != index_.end()) {
      ++stats_.hits;
      order_.splice(order_.begin(), order_, found->second);
      entry = *found->second;
      made_.wait(lock, [&] { return entry->value || entry->failure; });
      if (entry->failure) std::rethrow_exception(entry->failure);
      return entry->value;
    }
    ++stats_.misses;
    entry = std::make_shared<Entry>();
    entry->key = key;
    order_.push_front(entry);
    index_[key] = order_.begin();
    lock.unlock();
    std::shared_ptr<const Value> value;
    std::exception_ptr failure;
    int64_t size = 0;
    try {
      value = std::make_shared<const Value>(make());
      size = bytes(*value) + 2 * bytes_of(key);  // the entry and the index hold it
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    entry->value = value;
    entry->failure = failure;
    made_.notify_all();
    if (failure || size > stats_.capacity) {
      if (!failure) ++stats_.too_large;
      forget(key);
    } else {
      entry->bytes = size;
      stats_.bytes += size;
      make_room();
    }
    if (failure) std::rethrow_exception(failure);
    return value;
  }

  // Removes the value of `key`, so that the next get() makes it again, unless it is being made.
  void erase(const Key& key) {
    const std::lock_guard lock(mutex_);
    const auto found = index_.find(key);
    if (found != index_.end() && (*found->second)->value) forget(key);
  }

  CacheStats stats() const {
    const std::lock_guard lock(mutex_);
    CacheStats stats = stats_;
    stats.entries = static_cast<int64_t>(order_.size());
    return stats;
  }

  void set_capacity(int64_t bytes) {
    const std::lock_guard lock(mutex_);
    stats_.capacity = bytes;
    make_room();
  }

 private:
  struct Entry {
    Key key;
    std::shared_ptr<const Value> value;  // null while it is being made
    std::exception_ptr failure;
    int64_t bytes = 0;
  };
  using Order = std::list<std::shared_ptr<Entry>>;

  static int64_t bytes_of(const Key& key) {
    if constexpr (std::is_same_v<Key, std::string>) {
      return static_cast<int64_t>(key.size());
    } else {
      return key.bytes();
    }
  }
  struct Hash {
    size_t operator()(const Key& key) const {
      if constexpr (std::is_same_v<Key, std::string>) {
        return std::hash<std::string>()(key);
      } else {
        return key.hash();
      }
    }
  };

  void forget(const Key& key) {
    const auto found = index_.find(key);
    stats_.bytes -= (*found->second)->bytes;
    order_.erase(found->second);
    index_.erase(found);
  }
  // Entries that are still being made have no bytes yet and are not removed.
  void make_room() {
    auto it = order_.end();
    while (stats_.bytes > stats_.capacity && it != order_.begin()) {
      --it;
      if (!(*it)->value) continue;
      const Key key = (*it)->key;
      ++it;
      forget(key);
      ++stats_.evictions;
    }
  }

  mutable std::mutex mutex_;
  std::condition_variable made_;
  Order order_;  // the most recently used first
  std::unordered_map<Key, typename Order::iterator, Hash> index_;
  CacheStats stats_;
};

}  // namespace annulus
