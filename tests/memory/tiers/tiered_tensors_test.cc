// Tests of memory/tiers/tiered_tensors.h: any elements can be read and written, an update meets every chunk once and
// its results are what is read afterwards, the memory that is held, and what is said when the file fails.
#include "memory/tiers/tiered_tensors.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/error.h"
#include "memory/peak_bytes.h"
#include "tests/common/expect_error.h"
#include "tests/memory/tiers/counted_file.h"

namespace annulus::tiered_tensors_test {
namespace {

std::unique_ptr<TierFile> real_file() { return TierFile::in_folder(::testing::TempDir(), "optimizer.offload"); }

// Files that are read and written past the page cache and through it, and one on a disk.
std::vector<std::unique_ptr<TierFile>> files() {
  std::vector<std::unique_ptr<TierFile>> all;
  all.push_back(std::make_unique<CountedFile>(/*direct=*/true));
  all.push_back(std::make_unique<CountedFile>(/*direct=*/false));
  all.push_back(real_file());
  return all;
}

// What a write changes is exactly its elements, wherever chunks and blocks of the file begin.
TEST(TieredTensors, AnyElementsAreReadAndWritten) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    for (const int64_t chunk : {48, 1024, 3008}) {
      for (std::unique_ptr<TierFile>& file : files()) {
        TieredTensors tier({.dtype = dtype, .chunk = chunk}, std::move(file));
        const std::vector<int64_t> sizes = {1, 4008, 1024};
        std::vector<at::Tensor> all;
        for (const int64_t size : sizes) {
          EXPECT_EQ(tier.add(size), all.size());
          all.push_back(at::zeros({size}, dtype));
        }
        std::mt19937 random(7);
        for (int i = 0; i < 15; ++i) {
          const size_t vector = random() % sizes.size();
          const int64_t begin = static_cast<int64_t>(random()) % sizes[vector];
          const int64_t count = static_cast<int64_t>(random()) % (sizes[vector] - begin + 1);
          const at::Tensor values = at::randn({count}, i % 3 == 0 ? at::kBFloat16 : dtype);
          tier.write(vector, begin, values);
          all[vector].narrow(0, begin, count).copy_(values);
          ASSERT_TRUE(tier.read(vector, begin, count).equal(all[vector].narrow(0, begin, count)));
          ASSERT_TRUE(tier.read(vector, 0, sizes[vector]).equal(all[vector])) << "write " << i << ", chunk " << chunk;
        }
        for (size_t v = 0; v < all.size(); ++v) EXPECT_TRUE(tier.read(v, 0, sizes[v]).equal(all[v])) << chunk;
      }
    }
  }
}

// A chunk of more bytes than a buffer of the threads.
TEST(TieredTensors, LargeChunksAreReadAndWritten) {
  TieredTensors tier({}, real_file());
  const int64_t n = TieredTensors::kChunk + 100'016;
  const at::Tensor values = at::randn({n});
  tier.add(n);
  tier.write(0, 0, values);
  tier.write(0, 1'500'001, values.narrow(0, 0, 2'000'003));
  values.narrow(0, 1'500'001, 2'000'003).copy_(values.narrow(0, 0, 2'000'003).clone());
  EXPECT_TRUE(tier.read(0, 0, n).equal(values));
  tier.update({{0}}, [](size_t, int64_t, const std::vector<at::Tensor>& chunk) { at::Tensor(chunk[0]).add_(1); });
  EXPECT_TRUE(tier.read(0, 0, n).equal(values.add(1)));
}

// Adds to each vector of a group its number and the numbers of its elements.
void change(const std::vector<at::Tensor>& chunk, int64_t begin) {
  for (size_t i = 0; i < chunk.size(); ++i) {
    at::Tensor(chunk[i]).add_(at::arange(begin, begin + chunk[i].numel(), at::kFloat)).add_(static_cast<double>(i) + 1);
  }
}

TEST(TieredTensors, UpdatesEachChunkInOrder) {
  for (const int64_t chunk : {16, 48, 1024, 100000}) {
    for (std::unique_ptr<TierFile>& file : files()) {
      TieredTensors tier({.chunk = chunk}, std::move(file));
      const std::vector<std::vector<size_t>> groups = {{0, 3}, {}, {1, 2, 4}, {5}};
      const std::vector<int64_t> sizes = {400, 5008, 5008, 400, 5008, 16};
      std::vector<at::Tensor> all;
      for (const int64_t size : sizes) {
        all.push_back(at::randn({size}));
        tier.write(tier.add(size), 0, all.back());
      }
      for (int round = 0; round < 3; ++round) {
        std::vector<std::pair<size_t, int64_t>> met, expected;
        tier.update(groups, [&](size_t group, int64_t begin, const std::vector<at::Tensor>& now) {
          met.emplace_back(group, begin);
          ASSERT_EQ(now.size(), groups[group].size());
          for (size_t i = 0; i < now.size(); ++i) {
            EXPECT_TRUE(now[i].equal(all[groups[group][i]].narrow(0, begin, now[i].numel())));
          }
          change(now, begin);
        });
        for (size_t group = 0; group < groups.size(); ++group) {
          if (groups[group].empty()) continue;
          for (int64_t at = 0; at < sizes[groups[group][0]]; at += chunk) expected.emplace_back(group, at);
          std::vector<at::Tensor> vectors;
          for (const size_t vector : groups[group]) vectors.push_back(all[vector]);
          change(vectors, 0);
        }
        EXPECT_EQ(met, expected);
        if (round == 1) continue;  // the next update then follows at once
        for (size_t v = 0; v < all.size(); ++v) EXPECT_TRUE(tier.read(v, 0, sizes[v]).equal(all[v])) << v;
      }
      int64_t elements = 0;
      for (const int64_t size : sizes) elements += size;
      EXPECT_EQ(tier.stats().bytes_out, 3 * elements * 4);
      EXPECT_EQ(tier.stats().bytes_back, 3 * elements * 4);
      EXPECT_EQ(tier.stats().bytes_in_files, 3 * elements * 4);
      int64_t taken = 0;
      for (const int64_t size : sizes) taken += TieredTensors::in_file(size, 4, chunk);
      EXPECT_EQ(tier.stats().most_in_files, taken);
    }
  }
}

// While the first chunk is slow to be written, the fourth, which has the same buffers, is not read.
TEST(TieredTensors, BuffersAreReusedOnlyWhenTheyHaveBeenWritten) {
  auto file = std::make_unique<CountedFile>(/*direct=*/false);
  CountedFile& counted = *file;
  TieredTensors tier({.chunk = 16}, std::move(file));
  const at::Tensor values = at::randn({80});
  tier.add(80);
  tier.write(0, 0, values);
  const int writes = counted.writes_, reads = counted.reads_done_;
  counted.before_write_ = [&, writes, reads](int number) {
    for (int i = 0; number == writes && i < 100000 && counted.reads_done_ < reads + 4; ++i) std::this_thread::yield();
  };
  tier.update({{0}}, [](size_t, int64_t, const std::vector<at::Tensor>& chunk) { at::Tensor(chunk[0]).neg_(); });
  EXPECT_TRUE(tier.read(0, 0, 80).equal(values.neg()));
}

TEST(TieredTensors, HoldsThreeSetsOfChunks) {
  const auto bytes = std::make_shared<PeakBytes>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, bytes);
  TieredTensors tier({.chunk = 1024}, real_file());
  EXPECT_EQ(bytes->alive(), Transfers::kHeld);
  for (int i = 0; i < 2; ++i) tier.add(50'000);
  tier.add(512);
  for (int i = 0; i < 2; ++i) tier.update({{2}, {0, 1}}, [](size_t, int64_t, const std::vector<at::Tensor>&) {});
  EXPECT_EQ(bytes->alive(), Transfers::kHeld + 3 * 2 * 1024 * 4);
  EXPECT_EQ(bytes->peak(), bytes->alive());
  EXPECT_EQ(TieredTensors::buffers(2, 1024, 4), 3 * 2 * 1024 * 4);
  EXPECT_EQ(TieredTensors::buffers(3, int64_t{1} << 40, 4), 9 * TieredTensors::kChunk * 4);
  EXPECT_EQ(TieredTensors::in_pinned_memory(TieredTensors::kChunk + 3, 4), TieredTensors::kChunk * 4 + 16);
}

TEST(TieredTensors, FailuresAreRaisedByTheNextCall) {
  const auto nothing = [](size_t, int64_t, const std::vector<at::Tensor>&) {};
  for (const int at : {0, 1, 6}) {
    auto file = std::make_unique<CountedFile>(true);
    file->fail_write_ = at;
    TieredTensors tier({.chunk = 16}, std::move(file));
    tier.add(16 * 7);
    expect_error(ErrorKind::kResource, {"the disk failed at a write"}, [&] {
      tier.update({{0}}, nothing);
      tier.read(0, 0, 1);  // a checkpoint does not get what has not been written
    });
    expect_error(ErrorKind::kResource, {"the disk failed at a write"}, [&] { tier.update({{0}}, nothing); });
  }
  auto reads = std::make_unique<CountedFile>(true);
  reads->fail_read_ = 2;
  TieredTensors failing_reads({.chunk = 16}, std::move(reads));
  failing_reads.add(16 * 7);
  expect_error(ErrorKind::kResource, {"the disk failed at a read"}, [&] { failing_reads.update({{0}}, nothing); });
  auto full = std::make_unique<CountedFile>(true);
  full->most_ = 1 << 20;
  TieredTensors on_a_full_disk({}, std::move(full));
  on_a_full_disk.add(100'000);
  expect_error(ErrorKind::kResource, {"the disk is full"}, [&] { on_a_full_disk.add(200'000); });
}

TEST(TieredTensors, RefusesWhatDoesNotExist) {
  TieredTensors tier({.chunk = 16}, std::make_unique<CountedFile>(true));
  tier.add(100);
  expect_error(ErrorKind::kInternal, {"beyond the end"}, [&] { tier.read(0, 90, 11); });
  expect_error(ErrorKind::kInternal, {"beyond the end"}, [&] { tier.write(0, 90, at::zeros({11})); });
  expect_error(ErrorKind::kInternal, {"no tier but a file"}, [] { TieredTensors({}, nullptr); });
}

TEST(PlacedVector, IsATensorOrInATier) {
  TieredTensors tier({.chunk = 16}, real_file());
  tier.add(16);
  tier.add(100);
  const at::Tensor values = at::randn({100});
  for (const PlacedVector& all :
       {PlacedVector{.tensor = at::empty({100})}, PlacedVector{.tier = &tier, .vector = 1, .count = 100}}) {
    all.write(0, values.narrow(0, 0, 60));
    all.narrow(60, 40).write(0, values.narrow(0, 60, 40));
    const PlacedVector part = all.narrow(5, 90).narrow(10, 50);
    EXPECT_EQ(part.numel(), 50);
    EXPECT_EQ(part.scalar_type(), at::kFloat);
    EXPECT_TRUE(part.read(20, 30).equal(values.narrow(0, 35, 30)));
    EXPECT_TRUE(all.read(0, 100).equal(values));
  }
}

}  // namespace
}  // namespace annulus::tiered_tensors_test
