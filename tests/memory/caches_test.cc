// Tests that the named caches of a process share one total.
#include "memory/caches.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "common/error.h"

namespace annulus::caches_test {
namespace {

constexpr int64_t kMib = int64_t{1} << 20;

CacheReport report_of(std::string_view name) {
  for (const CacheReport& report : cache_reports()) {
    if (report.name == name) return report;
  }
  ADD_FAILURE() << "no report of " << name;
  return {};
}

void put(NamedCache<int>& cache, const std::string& key, int64_t bytes) {
  cache.get(
      key, [] { return 1; }, [&](int) { return bytes - 2 * static_cast<int64_t>(key.size()); });
}

// This test comes first, because the environment counts only until the total is set in this process.
TEST(Caches, TotalComesFromTheEnvironmentUnlessItIsSet) {
  ASSERT_EQ(setenv("ANNULUS_CACHES_MIB", "lots", 1), 0);
  EXPECT_THROW(cache_total(), Error);
  EXPECT_THROW(cache_reports(), Error);
  ASSERT_EQ(setenv("ANNULUS_CACHES_MIB", "-1", 1), 0);
  EXPECT_THROW(cache_total(), Error);
  ASSERT_EQ(setenv("ANNULUS_CACHES_MIB", "896", 1), 0);
  EXPECT_EQ(cache_total(), 896 * kMib);
  NamedCache<int> programs("programs");
  EXPECT_EQ(programs.stats().capacity, 256 * kMib);
  set_cache_total(kDefaultCacheTotal);
  EXPECT_EQ(programs.stats().capacity, 512 * kMib);
  EXPECT_THROW(set_cache_total(-1), Error);
  EXPECT_EQ(cache_total(), kDefaultCacheTotal);
}

TEST(Caches, SharesNeverExceedTheTotal) {
  for (const int64_t total : {int64_t{0}, int64_t{1}, int64_t{1000}, kMib, kDefaultCacheTotal, int64_t{1} << 40}) {
    set_cache_total(total);
    int64_t sum = 0, on_device = 0;
    std::set<std::string_view> names;
    for (const CacheReport& report : cache_reports()) {
      EXPECT_TRUE(names.insert(report.name).second) << report.name;
      EXPECT_FALSE(report.holds.empty());
      sum += report.stats.capacity;
      on_device += report.on_device ? report.stats.capacity : 0;
    }
    EXPECT_LE(sum, total);
    EXPECT_GE(sum, total - static_cast<int64_t>(names.size()));  // each share is rounded down
    EXPECT_EQ(on_device, cache_total_on_device(total));
  }
}

TEST(Caches, LowerTotalShrinksACacheToItsShare) {
  set_cache_total(kDefaultCacheTotal);
  NamedCache<int> cache("pattern texts");
  put(cache, "a", 2 * kMib);
  put(cache, "b", 2 * kMib);
  EXPECT_EQ(report_of("pattern texts").stats.bytes, 4 * kMib);
  EXPECT_EQ(report_of("pattern texts").stats.entries, 2);
  set_cache_total(kDefaultCacheTotal / 2);
  const CacheStats less = report_of("pattern texts").stats;
  EXPECT_EQ(less.capacity, 2 * kMib);
  EXPECT_EQ(less.bytes, 2 * kMib);
  EXPECT_EQ(less.evictions, 1);
  set_cache_total(0);
  EXPECT_EQ(report_of("pattern texts").stats.bytes, 0);
  put(cache, "c", kMib);
  EXPECT_EQ(report_of("pattern texts").stats.entries, 0);
  EXPECT_EQ(report_of("pattern texts").stats.too_large, 1);
}

// Threads put and ask, caches come and go, and the total changes, all at once.
TEST(Caches, ThreadsAskWhileTheTotalChanges) {
  set_cache_total(kDefaultCacheTotal);
  NamedCache<int> shared("patterns");
  std::atomic<bool> done = false;
  std::atomic<int> wrong = 0;
  const auto repeat = [&](const std::function<void(int)>& body) {
    return std::thread([&done, body] {
      for (int i = 0; i < 300 || !done; ++i) body(i);
    });
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.push_back(repeat([&, t](int i) { put(shared, std::to_string(i % (10 + t)), kMib); }));
  }
  threads.push_back(repeat([&](int) {
    NamedCache<int> own("compositions");
    put(own, "a", kMib);
  }));
  threads.push_back(repeat([&](int) {
    for (const CacheReport& report : cache_reports()) {
      if (report.stats.bytes < 0 || report.stats.bytes > kDefaultCacheTotal) ++wrong;
    }
  }));
  for (int i = 0; i < 300; ++i) set_cache_total(i % 3 * kDefaultCacheTotal / 2);
  done = true;
  for (std::thread& thread : threads) thread.join();
  set_cache_total(kDefaultCacheTotal / 100);
  EXPECT_EQ(wrong, 0);
  EXPECT_LE(shared.stats().bytes, shared.stats().capacity);
  EXPECT_EQ(report_of("patterns").stats.capacity, shared.stats().capacity);
  EXPECT_EQ(report_of("compositions").stats.entries, 0);
}

TEST(Caches, NameMustBeInTheTableAndUnique) {
  set_cache_total(kDefaultCacheTotal);
  EXPECT_THROW(NamedCache<int>("no such cache"), Error);
  auto first = std::make_unique<NamedCache<int>>("block maps");
  EXPECT_THROW(NamedCache<int>("block maps"), Error);
  put(*first, "a", kMib);
  EXPECT_EQ(report_of("block maps").stats.entries, 1);
  first.reset();
  EXPECT_EQ(report_of("block maps").stats.entries, 0);  // removed with the cache
  EXPECT_EQ(report_of("block maps").stats.capacity, 152 * kMib);
  EXPECT_NO_THROW(NamedCache<int>("block maps"));
}

}  // namespace
}  // namespace annulus::caches_test
