// Tests of memory/tiers/: tensors come back with the same bits in the reverse order, the memory that is held, and what
// is said when the file fails.
#include "memory/tiers/offload.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "common/error.h"
#include "memory/peak_bytes.h"
#include "tests/common/expect_error.h"
#include "tests/memory/tiers/counted_file.h"

namespace annulus::offload_test {
namespace {

std::string folder() { return ::testing::TempDir(); }

std::vector<at::Tensor> some_tensors(int64_t i) {
  return {at::randn({3, 100 + i}),
          at::Tensor(),
          at::randn({0, 7}),
          at::randn({1, 2, 3000000}).transpose(1, 2),
          at::randn({17}, at::kDouble),
          at::randn({5, 5}, at::kBFloat16)};
}

void expect_bits_return(std::unique_ptr<TierFile> file) {
  Offload offload({.layers = 3}, std::move(file));
  EXPECT_TRUE(offload.takes(2));
  EXPECT_FALSE(offload.takes(3));
  for (int pass = 0; pass < 3; ++pass) {
    std::vector<std::vector<at::Tensor>> all;
    std::vector<int64_t> tickets;
    for (int64_t i = 0; i < 3; ++i) {
      all.push_back(some_tensors(i));
      tickets.push_back(offload.put(all.back()));
    }
    if (pass == 1) offload.settle();
    for (int64_t i = 2; i >= 0; --i) {
      if (pass < 2) offload.fetch_next();
      const std::vector<at::Tensor> back = offload.take(tickets[static_cast<size_t>(i)]);
      ASSERT_EQ(back.size(), all[i].size());
      for (size_t t = 0; t < back.size(); ++t) {
        ASSERT_EQ(back[t].defined(), all[i][t].defined());
        if (!back[t].defined()) continue;
        EXPECT_TRUE(back[t].equal(all[i][t])) << pass << ", " << i << ", tensor " << t;
        EXPECT_EQ(back[t].scalar_type(), all[i][t].scalar_type());
      }
    }
  }
  const OffloadStats stats = offload.stats();
  EXPECT_EQ(stats.bytes_out, stats.bytes_back);
  EXPECT_EQ(stats.bytes_out, stats.bytes_in_files);
  EXPECT_GT(stats.bytes_out, 9 * 12000000);
  EXPECT_LT(stats.most_in_files, stats.bytes_out / 3 + 18 * TierFile::kBlock);  // the passes use the same part
}

TEST(Offload, BitsReturnFromARealFile) { expect_bits_return(TierFile::in_folder(folder(), "memory.offload")); }
TEST(Offload, BitsReturnPastThePageCache) { expect_bits_return(std::make_unique<CountedFile>(/*direct=*/true)); }
TEST(Offload, BitsReturnThroughThePageCache) { expect_bits_return(std::make_unique<CountedFile>(/*direct=*/false)); }

// At most what was put last and what comes next is in memory.
TEST(Offload, HoldsTheTensorsOfTwoLayersAtMost) {
  const auto bytes = std::make_shared<PeakBytes>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, bytes);
  Offload offload({.layers = 8}, TierFile::in_folder(folder(), "memory.offload"));
  const int64_t before = bytes->alive(), one = int64_t{4} << 20;
  EXPECT_LE(before, Transfers::kHeld);
  std::vector<int64_t> tickets;
  for (int i = 0; i < 8; ++i) tickets.push_back(offload.put({at::empty({one / 4})}));
  offload.settle();
  EXPECT_EQ(bytes->alive(), before);
  for (size_t i = 8; i-- > 0;) {
    const std::vector<at::Tensor> now = offload.take(tickets[i]);
    offload.fetch_next();
  }
  EXPECT_EQ(bytes->alive(), before);
  EXPECT_EQ(bytes->peak(), before + 2 * one);
}

TEST(Offload, ClearForgetsAForwardWithoutABackward) {
  Offload offload({.layers = 2}, std::make_unique<CountedFile>(true));
  offload.put(some_tensors(0));
  const int64_t forgotten = offload.put(some_tensors(1));
  offload.clear();
  const std::vector<at::Tensor> put = some_tensors(2);
  const int64_t ticket = offload.put(put);
  expect_error(ErrorKind::kInternal, {"each backward must run before the next forward"},
               [&] { offload.take(forgotten); });
  EXPECT_TRUE(offload.take(ticket)[0].equal(put[0]));
  expect_error(ErrorKind::kInternal, {"and once"}, [&] { offload.take(ticket); });
}

TEST(Offload, FailuresAreRaisedByTheNextCall) {
  auto writes = std::make_unique<CountedFile>(true);
  writes->fail_write_ = 2;
  Offload failing_writes({.layers = 2}, std::move(writes));
  failing_writes.put(some_tensors(0));
  expect_error(ErrorKind::kResource, {"the disk failed at a write"}, [&] { failing_writes.put(some_tensors(1)); });
  auto reads = std::make_unique<CountedFile>(true);
  reads->fail_read_ = 0;
  Offload failing_reads({.layers = 2}, std::move(reads));
  const int64_t ticket = failing_reads.put(some_tensors(0));
  expect_error(ErrorKind::kResource, {"the disk failed at a read"}, [&] { failing_reads.take(ticket); });
  auto full = std::make_unique<CountedFile>(true);
  full->most_ = 1 << 20;
  Offload on_a_full_disk({.layers = 2}, std::move(full));
  expect_error(ErrorKind::kResource, {"the disk is full"}, [&] { on_a_full_disk.put(some_tensors(0)); });
}

TEST(Offload, FileHasNoName) {
  const std::string in = folder() + "/offload-no-name";
  std::filesystem::create_directory(in);
  const std::unique_ptr<TierFile> file = TierFile::in_folder(in, "memory.offload");
  file->reserve(1 << 20);
  EXPECT_TRUE(std::filesystem::is_empty(in));
  EXPECT_GT(free_bytes_in(in, "memory.offload"), 0);
  EXPECT_TRUE(lies_in_memory("/dev/shm"));
  EXPECT_FALSE(lies_in_memory("/proc"));
}

TEST(Offload, RefusesFoldersAndSizesThatCannotBe) {
  const std::string missing = folder() + "/no-such-folder";
  expect_error(ErrorKind::kResource,
               {"optimizer.offload: cannot make a file in " + missing, "No such file", "memory.files",
                "optimizer.offload = \"none\""},
               [&] { TierFile::in_folder(missing, "optimizer.offload"); });
  expect_error(ErrorKind::kResource, {missing}, [&] { free_bytes_in(missing, "memory.offload"); });
  const std::unique_ptr<TierFile> file = TierFile::in_folder(folder(), "memory.offload");
  expect_error(ErrorKind::kResource, {"cannot reserve", folder()}, [&] { file->reserve(int64_t{1} << 60); });
  char byte = 0;
  expect_error(ErrorKind::kResource, {"cannot read"}, [&] { file->read(int64_t{1} << 40, &byte, 1); });
}

}  // namespace
}  // namespace annulus::offload_test
