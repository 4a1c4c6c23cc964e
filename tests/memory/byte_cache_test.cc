// Tests of ByteCache: each value is made once, the bytes are bounded, and the least recently used value is evicted when
// room is needed.
#include "memory/byte_cache.h"

#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace annulus::byte_cache_test {
namespace {

// Gets a value of `size` bytes in total, which includes the key; the cache holds the key twice.
std::shared_ptr<const std::string> get(ByteCache<std::string>& cache, const std::string& key, int64_t size) {
  return cache.get(
      key, [&] { return "value of " + key; },
      [&](const std::string&) { return size - 2 * static_cast<int64_t>(key.size()); });
}

TEST(ByteCache, EvictsTheLeastRecentlyUsedOnlyWhenFull) {
  ByteCache<std::string> cache(100);
  const auto a = get(cache, "a", 40);
  get(cache, "b", 40);
  EXPECT_EQ(cache.stats().evictions, 0);
  EXPECT_EQ(get(cache, "a", 40), a);  // a is used, so b is now the least recently used
  EXPECT_EQ(cache.stats().hits, 1);
  get(cache, "c", 40);
  CacheStats stats = cache.stats();
  EXPECT_EQ(stats.evictions, 1);
  EXPECT_EQ(stats.entries, 2);
  EXPECT_EQ(stats.bytes, 80);
  EXPECT_EQ(get(cache, "a", 40), a);
  get(cache, "b", 40);
  EXPECT_EQ(cache.stats().misses, 4);  // a, b, c and b again
}

TEST(ByteCache, DoesNotKeepValuesLargerThanItself) {
  ByteCache<std::string> cache(100);
  get(cache, "small", 50);
  EXPECT_EQ(*get(cache, "large", 101), "value of large");
  EXPECT_EQ(cache.stats().entries, 1);
  EXPECT_EQ(cache.stats().evictions, 0);
  EXPECT_EQ(cache.stats().too_large, 1);
  cache.set_capacity(10);
  EXPECT_EQ(cache.stats().bytes, 0);
}

TEST(ByteCache, ConcurrentRequestsMakeAValueOnce) {
  ByteCache<int> cache(1 << 20);
  std::atomic<int> made = 0, asking = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      ++asking;
      const auto value = cache.get(
          "key",
          [&] {
            while (asking < 8) std::this_thread::yield();  // until all threads ask
            return ++made;
          },
          [](int) { return 4; });
      EXPECT_EQ(*value, 1);
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(made, 1);
  EXPECT_EQ(cache.stats().hits, 7);
}

TEST(ByteCache, RaisesFailuresAndDoesNotKeepThem) {
  ByteCache<int> cache(100);
  const auto fail = []() -> int { throw std::runtime_error("no"); };
  EXPECT_THROW(cache.get("key", fail, [](int) { return 1; }), std::runtime_error);
  EXPECT_EQ(*cache.get(
                "key", [] { return 7; }, [](int) { return 1; }),
            7);
}

// Many threads use a small cache. Some values fail, some are larger than the cache, and its capacity changes.
TEST(ByteCache, KeepsItsBoundsAndCountsWithManyThreads) {
  constexpr int kThreads = 8, kRequests = 3000, kKeys = 40;
  constexpr int64_t kEach = 30, kCapacity = 10 * kEach;
  ByteCache<int> cache(kCapacity);
  std::atomic<int64_t> made = 0, failures = 0;
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < kThreads; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937 random(seed);
      for (int i = 0; i < kRequests; ++i) {
        const int number = static_cast<int>(random() % kKeys);
        const bool fails = number % 10 == 3, huge = number % 10 == 7;
        const std::string key = std::to_string(number);
        try {
          const auto value = cache.get(
              key,
              [&] {
                ++made;
                if (fails) throw std::runtime_error("no");
                return number;
              },
              [&](int) { return (huge ? 2 * kCapacity : kEach) - 2 * static_cast<int64_t>(key.size()); });
          EXPECT_EQ(*value, number);
          EXPECT_FALSE(fails);
        } catch (const std::runtime_error&) {
          EXPECT_TRUE(fails);
          ++failures;
        }
        if (i % 100 == 0) cache.set_capacity(i % 200 == 0 ? kCapacity : kCapacity / 2);
        const CacheStats stats = cache.stats();
        EXPECT_LE(stats.bytes, stats.capacity);
      }
    });
  }
  for (std::thread& t : threads) t.join();
  const CacheStats stats = cache.stats();
  EXPECT_EQ(stats.hits + stats.misses, kThreads * kRequests);
  EXPECT_EQ(stats.misses, made);
  EXPECT_GT(failures, 0);
  EXPECT_GT(stats.evictions, 0);
  EXPECT_EQ(stats.bytes, stats.entries * kEach);  // failed and oversized values are not counted
}

}  // namespace
}  // namespace annulus::byte_cache_test
