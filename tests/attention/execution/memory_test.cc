// Tests that attention makes no intermediate of queries x keys elements. For every kind of pattern, kernel and dropout
// rate the peak memory of the process stays a small part of one such matrix, forward and backward. And that no result
// is held in two dtypes where it need not be.
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include "attention/execution/attention.h"
#include "comm/threads/threads.h"
#include "tests/memory/peak_bytes.h"

namespace annulus::memory_test {
namespace {

int64_t peak_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss * int64_t{1024};
}

TEST(Memory, NoPatternTakesQuadraticMemory) {
  constexpr int64_t kLength = 16384;
  const int64_t matrix = kLength * kLength * 4;  // one fp32 number for each pair: 1 GiB
  for (const char* text : {
           "{ kind = \"full\" }",
           "{ kind = \"causal\" }",
           "{ kind = \"window\", left = 700, right = 3 }",
           "{ kind = \"dilated\", segment_lengths = [2048, 16384], dilation_rates = [1, 8], causal = true }",
           "{ kind = \"dilated\", segment_lengths = [2048, 16384], dilation_rates = [1, 8], combine = \"mean\" }",
           "{ kind = \"blocks\", map = \"bigbird\", window_blocks = 1, global_blocks = 1, random_blocks = 2, seed = 3 "
           "}",
           "{ kind = \"blocks\", map = \"hierarchical\", levels = [[1, 2], [8, 128]], causal = true }",
           "{ kind = \"blocks\", map = \"adaptive\", keep = 8 }",
           "{ kind = \"documents\", documents = [9000, 7384], causal = true }",
           "{ kind = \"union\", of = [{ kind = \"window\", left = 64, right = 64 }, { kind = \"blocks\", map = "
           "\"strided\", "
           "window_blocks = 1, stride = 16 }] }",
       }) {
    for (const double dropout : {0.0, 0.1}) {
      if (dropout > 0 && std::string(text).find("union") == std::string::npos) continue;  // dense pieces are too slow
      const int64_t before = peak_bytes();
      const std::shared_ptr<Communicator> self = make_self_communicator();
      AttentionCall call;
      call.comm = self.get();
      call.request.shape = {1, 2, 1, kLength, kLength, 0};
      call.request.pattern = parse_pattern(text, "test");
      call.dropout.rate = dropout;
      const at::Tensor q = at::randn({1, kLength, 2, 8}), k = at::randn({1, kLength, 1, 8});
      const AttentionOutput out = attention_forward(q, k, k, call);
      attention_backward(q, q, k, k, out, call);
      EXPECT_LT(peak_bytes() - before, matrix / 8) << text;
    }
  }
}

TEST(Memory, OutInBf16OfOneRankIsNotHeldInFp32) {
  const std::shared_ptr<Communicator> self = make_self_communicator();
  AttentionCall call;
  call.comm = self.get();
  call.kernel = KernelKind::kCpu;
  call.request.shape = {1, 2, 2, 4096, 4096, 0};
  call.request.pattern = causal_pattern();
  const at::Tensor q = at::randn({1, 4096, 2, 64}, at::kBFloat16);
  const auto peak = std::make_shared<PeakBytes>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, peak);
  const AttentionOutput out = attention_forward(q, q, q, call);
  EXPECT_LT(peak->peak(), static_cast<int64_t>(out.out.nbytes()) * 5 / 4);  // in fp32 it would be twice as much more
}

}  // namespace
}  // namespace annulus::memory_test
