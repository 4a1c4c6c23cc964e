// Many calls of attention over MPI ranks that lend each other their blocks: the process grows neither in memory, nor in
// descriptors, nor in mapped files of /dev/shm. Every rank of an mpirun runs it (mpi_test in bazel/mpi.bzl). --calls=N:
// how many, 30 by default; 100,000 are the long form.
#include <ATen/ops/randn.h>
#include <ATen/ops/randn_like.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>

#include "attention/execution/planned_call.h"
#include "attention/pattern/pattern.h"
#include "comm/mpi/mpi_runtime.h"
#include "memory/pool/pool.h"

namespace annulus {
namespace {

constexpr int64_t kMib = 1 << 20;
constexpr int64_t kBound = 4 * kMib;
constexpr int64_t kRows = 128, kHeadDim = 128;  // of a rank: tensors are just large enough to be lent
int64_t calls = 30;

int64_t open_files() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return std::distance(begin(all), end(all));
}

// Of this process alone: other programs have files there, too.
int64_t mapped_from_shm() {
  std::ifstream maps("/proc/self/maps");
  int64_t count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find(" /dev/shm/") != std::string::npos ? 1 : 0;
  return count;
}

int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t all = 0, resident = 0;
  file >> all >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

TEST(LendingOverMpi, ManyCallsTakeNoMoreThanAFew) {
  Pool::process().set_bound(kBound);
  const std::shared_ptr<MpiRuntime> runtime = MpiRuntime::start({});
  const std::unique_ptr<Communicator> world = runtime->make_world();
  world->set_timeout(Seconds(20));
  AttentionCall call;
  call.request = {
      .shape = {.batch = 1, .heads = 1, .kv_heads = 1, .q_len = kRows * world->size(), .k_len = kRows * world->size()},
      .pattern = PatternSpec{},  // every key, so that each of two ranks lends
      .schedule = ScheduleKind::kRing,
      .ranks = world->size()};
  call.comm = world.get();
  const at::Tensor q = at::randn({1, kRows, 1, kHeadDim}, at::kFloat), k = at::randn_like(q), v = at::randn_like(q);
  AttentionStats stats;
  const auto run = [&](int64_t times) {
    for (int64_t i = 0; i < times; ++i) {
      const AttentionOutput out = attention_forward(q, k, v, call, &stats);
      attention_backward(q, q, k, v, out, &stats);
    }
  };
  run(10);
  const int64_t resident = resident_bytes(), files = open_files(), shared = mapped_from_shm();
  run(calls);
  EXPECT_GT(stats.bytes_lent, 0);
  // Ranks that are ahead of others hold some blocks more, and free ones may take the bound.
  EXPECT_LE(resident_bytes(), resident + kBound + 2 * kMib);
  EXPECT_EQ(open_files(), files);
  EXPECT_EQ(mapped_from_shm(), shared);
  int64_t taken = 0, cached = 0;
  for (const PoolReport& purpose : Pool::process().reports()) {
    taken += purpose.stats.taken, cached += purpose.stats.cached;
  }
  EXPECT_LE(cached, kBound);
  std::printf("rank %d: resident %.1f MiB after 10 calls, %.1f MiB after %ld more; %ld blocks taken\n", world->rank(),
              static_cast<double>(resident) / kMib, static_cast<double>(resident_bytes()) / kMib,
              static_cast<long>(calls), static_cast<long>(taken));
}

}  // namespace
}  // namespace annulus

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    constexpr std::string_view kCalls = "--calls=";
    if (std::string_view(argv[i]).starts_with(kCalls)) annulus::calls = std::atoll(argv[i] + kCalls.size());
  }
  return RUN_ALL_TESTS();
}
