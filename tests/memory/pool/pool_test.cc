// Tests the pool: its size classes, which blocks it keeps and gives back, its counts, and the errors of wrong returns.
#include "memory/pool/pool.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "common/error.h"
#include "memory/numa.h"
#include "memory/pool/pool_vector.h"
#include "tests/common/in_child.h"

namespace annulus::pool_test {
namespace {

constexpr int64_t kMib = 1 << 20;

PoolStats stats_of(Pool& pool, PoolPurpose purpose) { return pool.reports()[static_cast<size_t>(purpose)].stats; }

int64_t cached(Pool& pool) {
  int64_t bytes = 0;
  for (const PoolReport& report : pool.reports()) bytes += report.stats.cached;
  return bytes;
}

// Heap memory of which only so many bytes may be taken.
class Limited final : public BlockSource {
 public:
  explicit Limited(int64_t bytes) : left_(bytes) {}
  void* take(int64_t bytes) override {
    if (bytes > left_) return nullptr;
    left_ -= bytes;
    return std::aligned_alloc(kBlockAlignment, static_cast<size_t>(bytes));
  }
  void give_back(void* block, int64_t bytes) override {
    left_ += bytes;
    std::free(block);
  }
  int64_t left() const { return left_; }

 private:
  int64_t left_;
};

template <typename Call>
std::string message_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

// The first case, because each child must be the first to use the pool of its process.
TEST(Pool, TheEnvironmentSetsTheBound) {
  for (const auto& [text, bound] :
       std::map<std::string, int64_t>{{"3", 3 * kMib}, {"", kDefaultPoolBound}, {"some", -1}, {"-1", -1}}) {
    in_child([&, text = text, bound = bound]() -> std::string {
      setenv("ANNULUS_POOL_MIB", text.c_str(), 1);
      try {
        return Pool::process().bound() == bound ? "" : "another bound";
      } catch (const Error& error) {
        const bool names = std::string(error.what()).find("ANNULUS_POOL_MIB") != std::string::npos;
        return bound < 0 && error.kind() == ErrorKind::kUsage && names ? "" : error.what();
      }
    });
  }
}

TEST(SizeClasses, AreTheSmallestThatHoldARequest) {
  for (int c = 0; c < kSizeClasses; ++c) {
    const int64_t bytes = class_bytes(c);
    EXPECT_EQ(size_class(bytes), c);
    EXPECT_EQ(bytes % kBlockAlignment, 0);
    if (c + 1 < kSizeClasses) {
      EXPECT_EQ(size_class(bytes + 1), c + 1);
      EXPECT_GT(class_bytes(c + 1), bytes);
    }
    const int64_t least = c == 0 ? 1 : class_bytes(c - 1) + 1;
    EXPECT_EQ(size_class(least), c);
    EXPECT_TRUE(bytes < least + kBlockAlignment || 8 * bytes < 9 * least) << c;
  }
  EXPECT_EQ(class_bytes(kSizeClasses - 1), kMostBlockBytes);
}

TEST(Pool, GivesABlockAgainThatWasReturned) {
  Pool pool(kMib);
  void* const first = pool.get(100'000, PoolPurpose::kScratch);
  pool.put(first, PoolPurpose::kScratch);
  EXPECT_EQ(pool.get(99'000, PoolPurpose::kGradients), first);  // of the same class, whatever it was used for
  EXPECT_NE(pool.get(100'000, PoolPurpose::kScratch), first);
  EXPECT_EQ(stats_of(pool, PoolPurpose::kGradients).reused, 1);
  EXPECT_EQ(stats_of(pool, PoolPurpose::kGradients).taken, 0);
  EXPECT_EQ(stats_of(pool, PoolPurpose::kScratch).taken, 2);
  pool.put(first, PoolPurpose::kGradients);
  EXPECT_EQ(pool.get(0, PoolPurpose::kScratch), nullptr);
  pool.put(nullptr, PoolPurpose::kScratch);
}

// The whole request may be written, and blocks of any size begin at multiples of 64.
TEST(Pool, BlocksHoldWhatWasAskedFor) {
  Pool pool(64 * kMib);
  for (int round = 0; round < 2; ++round) {
    std::map<char*, int64_t> blocks;
    for (int64_t bytes = 1; bytes < 3 * kMib; bytes = bytes * 5 / 4 + 7) {
      auto* const block = static_cast<char*>(pool.get(bytes, PoolPurpose::kStaging));
      EXPECT_EQ(reinterpret_cast<uintptr_t>(block) % kBlockAlignment, 0u);
      std::memset(block, 1, static_cast<size_t>(bytes));
      blocks[block] = bytes;
    }
    const char* end = nullptr;
    for (const auto& [block, bytes] : blocks) {
      EXPECT_GE(block, end);
      end = block + bytes;
    }
    for (const auto& [block, bytes] : blocks) pool.put(block, PoolPurpose::kStaging);
  }
  const PoolStats stats = stats_of(pool, PoolPurpose::kStaging);
  EXPECT_EQ(stats.reused, stats.taken);
}

TEST(Pool, CountsWhatIsInUseByPurpose) {
  Pool pool(kMib);
  void* const a = pool.get(200'000, PoolPurpose::kTravelling);
  void* const b = pool.get(6'400, PoolPurpose::kScratch);
  const int64_t block = class_bytes(size_class(200'000));
  EXPECT_EQ(stats_of(pool, PoolPurpose::kTravelling).in_use, block);
  EXPECT_EQ(stats_of(pool, PoolPurpose::kScratch).in_use, class_bytes(size_class(6'400)));
  pool.put(a, PoolPurpose::kTravelling);
  const PoolStats stats = stats_of(pool, PoolPurpose::kTravelling);
  EXPECT_EQ(stats.in_use, 0);
  EXPECT_EQ(stats.cached, block);
  EXPECT_EQ(stats.peak, block);
  EXPECT_EQ(stats.requested_at_peak, 200'000);
  EXPECT_DOUBLE_EQ(stats.fragmentation(), 1 - 200'000.0 / static_cast<double>(block));
  EXPECT_EQ(pool.in_use(), "1 block of kernel scratch (6,400 bytes)");
  pool.put(b, PoolPurpose::kScratch);
  EXPECT_EQ(pool.in_use(), "");
}

TEST(Pool, FreeBlocksTakeAtMostTheBound) {
  Pool pool(kMib);
  std::vector<void*> blocks;
  for (int i = 0; i < 20; ++i) blocks.push_back(pool.get(128 << 10, PoolPurpose::kScratch));
  for (void* const block : blocks) {
    pool.put(block, PoolPurpose::kScratch);
    EXPECT_LE(cached(pool), kMib);
  }
  EXPECT_EQ(cached(pool), kMib);
  pool.put(pool.get(2 * kMib, PoolPurpose::kScratch), PoolPurpose::kScratch);  // larger than the bound
  EXPECT_EQ(cached(pool), 0);
}

// Sizes that are not used any more, as those of an earlier stage of a run, make room for others.
TEST(Pool, GivesBackWhatHasBeenFreeForLongest) {
  Pool pool(kMib);
  void* const old = pool.get(512 << 10, PoolPurpose::kTravelling);
  pool.put(old, PoolPurpose::kTravelling);
  for (int i = 0; i < 3; ++i) {
    void* const next = pool.get(384 << 10, PoolPurpose::kGradients);
    pool.put(next, PoolPurpose::kGradients);
    pool.put(pool.get(256 << 10, PoolPurpose::kScratch), PoolPurpose::kScratch);
  }
  EXPECT_EQ(stats_of(pool, PoolPurpose::kTravelling).cached, 0);
  EXPECT_EQ(stats_of(pool, PoolPurpose::kGradients).taken, 1);
  EXPECT_EQ(stats_of(pool, PoolPurpose::kScratch).taken, 1);
}

TEST(Pool, TrimsAndTakesAnotherBound) {
  Pool pool(8 * kMib);
  std::vector<void*> blocks;
  for (int i = 0; i < 8; ++i) blocks.push_back(pool.get(kMib, PoolPurpose::kScratch));
  for (void* const block : blocks) pool.put(block, PoolPurpose::kScratch);
  EXPECT_EQ(cached(pool), 8 * kMib);
  pool.trim(5 * kMib);
  EXPECT_EQ(cached(pool), 5 * kMib);
  pool.set_bound(2 * kMib);
  EXPECT_EQ(cached(pool), 2 * kMib);
  EXPECT_EQ(pool.bound(), 2 * kMib);
  EXPECT_THROW(pool.set_bound(-1), Error);
  pool.set_bound(0);
  pool.put(pool.get(kMib, PoolPurpose::kScratch), PoolPurpose::kScratch);
  EXPECT_EQ(cached(pool), 0);
}

TEST(Pool, GivesFreeBlocksBackWhenMemoryIsRefused) {
  Pool pool(8 * kMib);
  Limited source(2 * kMib);
  pool.add(source);
  void* const held = pool.get(kMib, PoolPurpose::kLent, &source);
  void* const other = pool.get(kMib, PoolPurpose::kLent, &source);
  pool.put(other, PoolPurpose::kLent);
  void* const half = pool.get(kMib / 2, PoolPurpose::kLent, &source);  // only after `other` has gone back
  EXPECT_NE(half, nullptr);
  EXPECT_EQ(source.left(), kMib / 2);
  EXPECT_EQ(pool.try_get(kMib, PoolPurpose::kLent, &source), nullptr);
  const std::string message = message_of([&] { pool.get(kMib, PoolPurpose::kLent, &source); });
  EXPECT_NE(message.find("1,048,576 bytes for lent blocks"), std::string::npos) << message;
  EXPECT_NE(message.find("2 blocks of lent blocks"), std::string::npos) << message;
  pool.put(half, PoolPurpose::kLent);
  pool.remove(source);
  EXPECT_EQ(source.left(), kMib);
  EXPECT_EQ(pool.in_use(), "");
  source.give_back(held, kMib);  // what was in use is the source's own now
}

// The kernel gives a process with a limit its memory only once the pool has given its free blocks back.
TEST(Pool, GivesFreeBlocksOfTheHostBackWhenMemoryIsRefused) {
  in_child([]() -> std::string {
    Pool pool(1024 * kMib);
    pool.put(pool.get(300 * kMib, PoolPurpose::kScratch), PoolPurpose::kScratch);
    int64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const auto most = static_cast<rlim_t>(pages * sysconf(_SC_PAGESIZE) + 100 * kMib);
    const rlimit limit{most, most};
    if (setrlimit(RLIMIT_AS, &limit) != 0) throw SkipTheTest{"the address space cannot be limited"};
    void* const block = pool.try_get(350 * kMib, PoolPurpose::kGradients);
    if (block == nullptr) return "the free block was not given back";
    if (cached(pool) != 0) return "the free block is said to be there";
    std::memset(block, 1, kMib);
    const std::string message = message_of([&] { pool.get(350 * kMib, PoolPurpose::kSaving); });
    pool.put(block, PoolPurpose::kGradients);
    return message.find("for copies of a save, although the pool has given back its free blocks") != std::string::npos
               ? ""
               : message;
  });
}

// More than any process can have; the pool of the host says so as well.
TEST(Pool, RefusesWhatNoMachineHas) {
  Pool pool(kMib);
  EXPECT_EQ(pool.try_get(int64_t{1} << 46, PoolPurpose::kScratch), nullptr);
  EXPECT_EQ(pool.try_get(INT64_MAX, PoolPurpose::kScratch), nullptr);
  EXPECT_THROW(pool.get(INT64_MAX, PoolPurpose::kScratch), Error);
  EXPECT_THROW(pool.get(-1, PoolPurpose::kScratch), Error);
}

TEST(Pool, WrongReturnsAreErrorsThatNameTheBlock) {
  Pool pool(kMib);
  auto* const block = static_cast<char*>(pool.get(200'000, PoolPurpose::kTravelling));
  const auto put = [&](const void* memory, PoolPurpose purpose) {
    return message_of([&] { pool.put(memory, purpose); });
  };
  const std::string named = "a block of travelling blocks (200,000 bytes)";
  EXPECT_EQ(put(block, PoolPurpose::kGradients), "[memory] " + named + " is returned to the pool as one of gradients");
  const std::string inside = put(block + 64, PoolPurpose::kTravelling);
  EXPECT_NE(inside.find("as travelling blocks, but the pool has not given it: it is inside of " + named),
            std::string::npos)
      << inside;
  char foreign = 0;
  EXPECT_NE(put(&foreign, PoolPurpose::kScratch).find("as kernel scratch, but the pool has not given it"),
            std::string::npos);
  pool.put(block, PoolPurpose::kTravelling);
  EXPECT_EQ(put(block, PoolPurpose::kTravelling), "[memory] " + named + " is returned to the pool a second time");
}

TEST(Pool, ReportsWhatIsNotReturnedAtItsEnd) {
  void* left = nullptr;
  ::testing::internal::CaptureStderr();
  {
    Pool pool(kMib);
    left = pool.get(30'000, PoolPurpose::kGradients);
    pool.put(pool.get(30'000, PoolPurpose::kScratch), PoolPurpose::kScratch);
  }
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("not returned to the pool at its end: 1 block of gradients (30,000 bytes)"), std::string::npos)
      << said;
  std::memset(left, 1, 30'000);  // it stays valid
}

TEST(Pool, VectorsTakeTheirElementsFromIt) {
  const auto scratch = [] { return stats_of(Pool::process(), PoolPurpose::kScratch); };
  const PoolStats before = scratch();
  {
    PoolVector<double, PoolPurpose::kScratch> numbers(10'000, 2.5);
    EXPECT_EQ(scratch().in_use - before.in_use, class_bytes(size_class(80'000)));
    EXPECT_EQ(numbers.back(), 2.5);
  }
  EXPECT_EQ(scratch().in_use, before.in_use);
}

std::vector<int> nodes_of_this_machine() {
  std::vector<int> nodes;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/sys/devices/system/node", error)) {
    const std::string name = entry.path().filename();
    if (name.starts_with("node")) nodes.push_back(std::stoi(name.substr(4)));
  }
  if (nodes.empty()) nodes.push_back(0);
  return nodes;
}

// Whichever thread touches it first. The kernel reports the policy of a page, and, once it is touched, its node.
TEST(Pool, BlocksLieOnTheNodesOfTheRank) {
  for (const int node : nodes_of_this_machine()) {
    in_child([&]() -> std::string {
      Pool pool(64 * kMib);
      void* const before = pool.get(4 * kMib, PoolPurpose::kScratch);
      pool.put(before, PoolPurpose::kScratch);
      pool.set_nodes({node});
      if (cached(pool) != 0) return "blocks of other nodes are kept";
      void* const block = pool.get(4 * kMib, PoolPurpose::kScratch);
      if (nodes_bound_to(block) != std::vector<int>{node}) {
        if (!bind_pages(block, 4 * kMib, {node})) throw SkipTheTest{"the kernel binds no pages here"};
        return "the kernel reports another binding";
      }
      std::thread([&] { std::memset(block, 1, 4 * kMib); }).join();
      const std::vector<int> touched = nodes_of_pages(block, 4 * kMib);
      if (touched.empty()) throw SkipTheTest{"the kernel does not say where pages are"};
      pool.put(block, PoolPurpose::kScratch);
      return touched == std::vector<int>{node} ? "" : "pages are on another node";
    });
  }
}

// The fork may come while another thread has the lock.
TEST(Pool, ForkedChildrenMayUseIt) {
  std::atomic<bool> stop = false;
  std::thread busy([&] {
    while (!stop) Pool::process().put(Pool::process().get(1'000, PoolPurpose::kScratch), PoolPurpose::kScratch);
  });
  for (int i = 0; i < 20; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      void* const block = Pool::process().get(1'000, PoolPurpose::kStaging);
      Pool::process().put(block, PoolPurpose::kStaging);
      _exit(block != nullptr ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
  stop = true;
  busy.join();
}

}  // namespace
}  // namespace annulus::pool_test
