// Tests the NCCL backend's guarantees about streams, memory and deadlines of a device, which no other backend has. One
// GPU is enough, because a rank exchanges with itself. This is built in CUDA builds and skipped, with the reason,
// without a GPU.
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/cuda/Sleep.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/ones.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <cstdio>
#include <cstdlib>

#include "comm/nccl/nccl_communicator.h"
#include "comm/threads/threads.h"
#include "common/error.h"

namespace annulus {
namespace {

constexpr int64_t kAboutASecond = 2'000'000'000;  // clock cycles
const at::TensorOptions kFloats = at::TensorOptions().dtype(at::kFloat).device(at::Device(at::kCUDA, 0));

class NcclDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string why = nccl_unavailable();
    if (!why.empty()) GTEST_SKIP() << why;
    host_ = make_self_communicator();
    comm_ = make_nccl_communicator(*host_, {.device = 0, .timeout = Seconds(60)});
    comm_->set_timeout(Seconds(60));
    // This makes NCCL and LibTorch allocate the memory that they allocate once.
    const at::Tensor out = at::ones({1024}, kFloats), in = at::empty({1024}, kFloats);
    send(out, in)->wait();
    EXPECT_TRUE(at::equal(in, out));
  }

  std::unique_ptr<Work> send(const at::Tensor& out, const at::Tensor& in) {
    return comm_->exchange({{out, 0}}, {{in, 0}}, {"to itself", 0});
  }

  std::shared_ptr<Communicator> host_, comm_;
};

int64_t reserved_bytes() {
  const auto which = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return c10::cuda::CUDACachingAllocator::getDeviceStats(0).reserved_bytes[which].current;
}

// The host is ahead of the device all the time, so only the order of streams decides when memory may be reused.
TEST_F(NcclDevice, MemoryIsReusedInStreamOrder) {
  constexpr int64_t kLength = int64_t{16} << 20;
  const auto pass = [&](float value) {
    const at::Tensor out = at::full({kLength}, value, kFloats), in = at::empty({kLength}, kFloats);
    auto work = send(out, in);
    work->wait();
    return in.slice(0, 0, kLength, kLength / 64).clone();
  };
  pass(0);
  const int64_t before = reserved_bytes();
  at::cuda::sleep(kAboutASecond);
  std::vector<at::Tensor> samples;
  for (int i = 1; i <= 8; ++i) samples.push_back(pass(static_cast<float>(i)));
  EXPECT_EQ(reserved_bytes(), before);
  for (int i = 1; i <= 8; ++i) {
    const at::Tensor& sample = samples[static_cast<size_t>(i - 1)];
    EXPECT_TRUE(at::equal(sample, at::full({sample.numel()}, static_cast<float>(i), kFloats))) << i;
  }
}

// The transfer is waited for on another stream than the one that started it, and the sent tensor may still be freed.
TEST_F(NcclDevice, AnotherStreamMayWait) {
  constexpr int64_t kLength = int64_t{16} << 20;
  const at::Tensor in = at::empty({kLength}, kFloats);
  at::cuda::sleep(kAboutASecond);
  auto work = send(at::full({kLength}, 3, kFloats), in);
  const c10::cuda::CUDAStream other = c10::cuda::getStreamFromPool(/*isHighPriority=*/false, 0);
  at::Tensor copy;
  {
    const c10::cuda::CUDAStreamGuard guard(other);
    work->wait();
    copy = in.clone();
  }
  const at::Tensor scribbled = at::full({kLength}, 4, kFloats);  // overwrites a sent tensor that was freed too early
  other.synchronize();
  EXPECT_TRUE(at::equal(copy, at::full({kLength}, 3, kFloats)));
}

// A deadline starts when the device reaches the transfer, because its earlier work is not the fault of a peer.
TEST_F(NcclDevice, DeadlineExcludesEarlierWork) {
  comm_->set_timeout(Seconds(0.3));
  const at::Tensor out = at::full({1024}, 5, kFloats), in = at::empty({1024}, kFloats);
  at::cuda::sleep(kAboutASecond);
  auto work = send(out, in);
  while (!work->test()) sched_yield();
  work->wait();
  EXPECT_TRUE(at::equal(in, out));
}

// The host continues while the device is busy, and every form gives the result of the blocking form.
TEST_F(NcclDevice, BegunCollectivesDoNotBlockTheHost) {
  const at::Tensor in = at::full({1024}, 3, kFloats), out = at::empty({1, 1024}, kFloats);
  const at::Tensor narrow = at::full({1, 1024}, 2, kFloats.dtype(at::kBFloat16));
  const at::Tensor in_place = narrow[0];
  at::cuda::sleep(kAboutASecond);
  const auto gather = comm_->begin_all_gather(out, in, {"weights of layer 1", 0});
  const auto scatter = comm_->begin_reduce_scatter(in_place, narrow, {"gradients of layer 2", 0});
  const auto ring = send(in, at::empty({1024}, kFloats));
  EXPECT_FALSE(gather->test());
  EXPECT_FALSE(scatter->test());
  scatter->wait();
  gather->wait();
  EXPECT_TRUE(at::equal(out[0], in));
  EXPECT_TRUE(at::equal(narrow, at::full({1, 1024}, 2, kFloats.dtype(at::kBFloat16))));
}

// A wait is the time for which the waiting stream stalls. Here that stream has nothing else to do while the transfer is
// delayed on another stream. Waits are reported by purpose, once the device has completed them.
TEST_F(NcclDevice, WaitsMeasureTheStallOfTheStream) {
  const auto waits = [&](double CommStats::*kind, const std::function<std::unique_ptr<Work>()>& begin) {
    c10::cuda::getCurrentCUDAStream().synchronize();
    comm_->progress();
    const CommStats before = comm_->stats();
    at::cuda::sleep(kAboutASecond / 4);
    const auto work = begin();
    const c10::cuda::CUDAStream other = c10::cuda::getStreamFromPool(/*isHighPriority=*/false, 0);
    {
      const c10::cuda::CUDAStreamGuard guard(other);
      work->wait();
      comm_->progress();
    }
    EXPECT_EQ(comm_->stats().wait_seconds, before.wait_seconds);
    other.synchronize();
    comm_->progress();
    const CommStats& after = comm_->stats();
    const double waited = after.wait_seconds - before.wait_seconds;
    EXPECT_GT(waited, 0.01);                                // a quarter of a second, on a device of 2 GHz
    EXPECT_NEAR(after.*kind - before.*kind, waited, 1e-9);  // to a nanosecond, which is the unit of the clock
  };
  const at::Tensor in = at::full({1024}, 3, kFloats), out = at::empty({1024}, kFloats);
  const at::Tensor all = at::empty({1, 1024}, kFloats);
  waits(&CommStats::exchange_wait_seconds, [&] { return send(in, out); });
  waits(&CommStats::gather_wait_seconds, [&] { return comm_->begin_all_gather(all, in, {"weights", 0}); });
  waits(&CommStats::reduce_wait_seconds, [&] { return comm_->begin_reduce_scatter(out, all, {"gradients", 0}); });
}

TEST_F(NcclDevice, ABoundOnThreadBlocksChangesNoResult) {
  const std::unique_ptr<Communicator> bounded = comm_->split(0, 0, {.max_ctas = 2});
  const at::Tensor out = at::full({1 << 20}, 3, kFloats), in = at::empty({1 << 20}, kFloats);
  bounded->exchange({{out, 0}}, {{in, 0}}, {"to itself", 0})->wait();
  EXPECT_TRUE(at::equal(in, out));
}

// LibTorch must not take a query of a transfer in progress for a failed kernel.
TEST_F(NcclDevice, ProgressLeavesNoErrorBehind) {
  const at::Tensor out = at::full({1024}, 6, kFloats), in = at::empty({1024}, kFloats);
  at::cuda::sleep(kAboutASecond / 4);
  auto work = send(out, in);
  comm_->progress();
  EXPECT_FALSE(work->test());
  EXPECT_NO_THROW(at::full({16}, 1, kFloats));
  work->wait();
  EXPECT_TRUE(at::equal(in, out));
}

TEST_F(NcclDevice, RefusesGraphCapture) {
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, 0));
  at::Tensor out = at::full({1024}, 7, kFloats);
  const at::Tensor in = at::empty({1024}, kFloats);
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  const auto refused = [&](const std::function<void()>& body) {
    try {
      body();
      ADD_FAILURE() << "no error";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kPlan);
      EXPECT_NE(std::string(e.what()).find("CUDA graph"), std::string::npos) << e.what();
    }
  };
  refused([&] { send(out, in); });
  refused([&] { comm_->all_reduce(out, ReduceOp::kSum, {"captured", 0}); });
  refused([&] { comm_->begin_all_gather(out.view({1, 1024}), in, {"captured", 0}); });
  out.add_(1);
  graph.capture_end();
  // The graph and the communicator still work.
  graph.replay();
  send(out, in)->wait();
  EXPECT_TRUE(at::equal(in, at::full({1024}, 8, kFloats)));
}

// A kernel that fails makes every later call of CUDA in the process fail, so this runs in a process of its own.
TEST_F(NcclDevice, AFailureOfTheDeviceIsAnErrorOfTheTransfer) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto fail = [&] {
    const at::Tensor out = at::full({1024}, 9, kFloats), in = at::empty({1024}, kFloats);
    const at::Tensor beyond = at::full({1}, int64_t{1} << 20, kFloats.dtype(at::kLong));
    at::cuda::sleep(kAboutASecond / 4);
    at::index_select(out, 0, beyond);
    try {
      const auto work = send(out, in);
      for (;;) comm_->progress();
    } catch (const Error& e) {
      std::fprintf(stderr, "kind %d: %s\n", static_cast<int>(e.kind()), e.what());
      std::_Exit(e.kind() == ErrorKind::kComm ? 7 : 1);
    }
  };
  EXPECT_EXIT(fail(), ::testing::ExitedWithCode(7), "to itself.*the device of rank 0");
}

// A graph may be captured while a transfer is in progress and watched.
TEST_F(NcclDevice, TransferInProgressDoesNotDisturbACapture) {
  const at::Tensor out = at::full({1024}, 9, kFloats), in = at::empty({1024}, kFloats);
  at::Tensor counter;
  at::cuda::sleep(kAboutASecond);
  auto work = send(out, in);
  {
    const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, 0));
    counter = at::full({1}, 0, kFloats);
    at::cuda::CUDAGraph graph;
    graph.capture_begin();
    // The capture takes long enough for the watching thread to check several times.
    for (int i = 0; i < 20000; ++i) counter.add_(1);
    graph.capture_end();
    c10::cuda::getCurrentCUDAStream().synchronize();
    graph.replay();
    c10::cuda::getCurrentCUDAStream().synchronize();
  }
  work->wait();
  EXPECT_TRUE(at::equal(in, out));
  EXPECT_EQ(counter.item<float>(), 20000);
}

}  // namespace
}  // namespace annulus
