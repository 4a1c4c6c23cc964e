// Tests that attention holds nothing that grows with queries x keys: for every kind of pattern and block map, every
// kernel for CPUs, with and without dropout, on one rank and on several, forward and backward. And that no result is
// held in two dtypes where it need not be.
//
// Each call is measured alone. It is made at one length and at twice that length, so that what a kernel holds whatever
// the length is in both peaks. Kernels that compute densely hold blocks of bounded size, which sequences that are short
// enough for a test do not fill; they are slow by design, so they are run at the shorter length alone, and may hold
// such a block on each rank.
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <malloc.h>

#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "attention/execution/planned_call.h"
#include "attention/kernels/choose_kernel.h"
#include "attention/pattern/pattern.h"
#include "attention/plan/layout.h"
#include "attention/plan/plan.h"
#include "comm/threads/threads.h"
#include "memory/peak_bytes.h"

namespace annulus::memory_test {
namespace {

// A number of /proc/self/status, in bytes.
int64_t bytes_in_status(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (!line.starts_with(key + ":")) continue;
    std::istringstream rest(line.substr(key.size() + 1));
    int64_t kib = 0;
    rest >> kib;
    return kib << 10;
  }
  ADD_FAILURE() << "no " << key;
  return 0;
}

// Sets the process's high-water mark to what is resident now, which Linux does since 4.0. Returns whether it did.
bool reset_high_water_mark() {
  std::ofstream("/proc/self/clear_refs") << 5 << std::flush;
  return bytes_in_status("VmHWM") <= bytes_in_status("VmRSS") + (1 << 20);
}

// The most memory that the process has had resident while `call` ran, beyond what it had before: tensors as well as
// memory that kernels take from elsewhere. What earlier calls have freed is given back to the system first, so that it
// is not used again unseen.
int64_t resident_peak_of(const std::function<void()>& call) {
  malloc_trim(0);
  reset_high_water_mark();
  const int64_t before = bytes_in_status("VmRSS");
  call();
  return bytes_in_status("VmHWM") - before;
}

struct Peaks {
  int64_t resident = 0;
  int64_t allocated = 0;  // by LibTorch, all ranks together, touched or not
};

struct MemoryCase {
  std::string pattern;  // "given" stands for a map made by a program or read from a file
  KernelKind kernel;
  double dropout;
  int ranks;
};

std::string text_of(const MemoryCase& c) {
  return c.pattern + ", kernel " + std::string(to_string(c.kernel)) + ", dropout " + std::to_string(c.dropout) + ", " +
         std::to_string(c.ranks) + " ranks";
}

// Each row of blocks has four active ones, in other places for each head.
PatternSpec given_pattern(int64_t length) {
  constexpr int64_t kBlock = 64;
  const int64_t blocks = length / kBlock;
  std::vector<uint8_t> active(static_cast<size_t>(2 * blocks * blocks), 0);
  for (int64_t row = 0; row < 2 * blocks; ++row) {
    for (int64_t i = 0; i < 4; ++i) active[static_cast<size_t>(row * blocks + (7 * row + 5 * i * i) % blocks)] = 1;
  }
  PatternSpec spec;
  spec.kind = PatternSpec::Kind::kBlocks;
  spec.blocks =
      given_map(std::make_shared<const BlockMap>(block_map_from_dense(active.data(), kBlock, 1, 2, blocks, blocks)));
  return spec;
}

// Forward and backward over 2 query heads and a kv head.
Peaks peaks_of(const MemoryCase& c, int64_t length) {
  PlanRequest request;
  request.shape = {1, 2, 1, length, length, 0};
  request.pattern = c.pattern == "given" ? given_pattern(length) : parse_pattern(c.pattern, "test");
  request.ranks = c.ranks;
  request.layout = LayoutKind::kContiguous;
  Peaks peaks;
  std::mutex mutex;
  peaks.resident = resident_peak_of([&] {
    run_ranks(c.ranks, [&](Communicator& comm) {
      const auto allocated = std::make_shared<PeakBytes>();
      const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, allocated);
      AttentionCall call;
      call.request = request;
      call.comm = &comm;
      call.kernel = c.kernel;
      call.dropout.rate = c.dropout;
      const int64_t own = query_layout(request).count(comm.rank());
      const at::Tensor q = at::randn({1, own, 2, 8}), k = at::randn({1, own, 1, 8});
      const AttentionOutput out = attention_forward(q, k, k, call);
      attention_backward(q, q, k, k, out);
      const std::lock_guard lock(mutex);
      peaks.allocated += allocated->peak();
    });
  });
  return peaks;
}

std::vector<std::string> every_pattern(int64_t length) {
  const std::string n = std::to_string(length), half = std::to_string(length / 2);
  const std::string blocks = "{ kind = \"blocks\", block = 64, map = ";
  return {
      "{ kind = \"full\" }",
      "{ kind = \"causal\" }",
      "{ kind = \"window\", left = 300, right = 3 }",
      "{ kind = \"documents\", documents = [" + half + ", " + half + "], causal = true }",
      "{ kind = \"dilated\", segment_lengths = [256, " + n + "], dilation_rates = [1, 8], causal = true }",
      "{ kind = \"dilated\", segment_lengths = [256, " + n + "], dilation_rates = [1, 8], combine = \"mean\" }",
      blocks + "\"local\", window_blocks = 2 }",
      blocks + "\"dilated\", window_blocks = 8, rate = 2 }",
      blocks + "\"global-local\", window_blocks = 1, global_blocks = 1 }",
      blocks + "\"bigbird\", window_blocks = 1, global_blocks = 1, random_blocks = 2, seed = 3 }",
      blocks + "\"strided\", window_blocks = 1, stride = 8 }",
      blocks + "\"hierarchical\", levels = [[1, 2], [8, 32]], causal = true }",
      blocks + "\"adaptive\", keep = 4 }",
      "given",
      "{ kind = \"union\", of = [{ kind = \"window\", left = 64, right = 64 }, " + blocks +
          "\"strided\", window_blocks = 1, stride = 16 }] }",
      "{ kind = \"slices\", slices = [{ queries = [0, 1, " + n + "], keys = [0, 1, " + n +
          "], lo = -500, hi = 10 }, { queries = [1, 2, " + half + "], keys = [0, 1, " + n + "], hi = -700 }] }",
  };
}

// Whether the kernel computes some or all of the case densely in blocks of rows and keys
// (docs/explanation/attention.md).
bool in_dense_blocks(const MemoryCase& c) {
  return c.kernel == KernelKind::kReference || (c.kernel == KernelKind::kEfficient && c.dropout > 0);
}

TEST(Memory, NoPatternTakesQuadraticMemory) {
  if (!reset_high_water_mark()) GTEST_SKIP() << "this system does not reset the high-water mark of a process";
  mallopt(M_MMAP_THRESHOLD, 1 << 20);  // longer blocks are given back as they are freed
  constexpr int64_t kLength = 1536;
  // What a matrix with one byte for each pair of one head would grow by if the sequence became twice as long.
  constexpr int64_t kMatrix = 3 * kLength * kLength;
  // A block of 256 x 1,024 pairs of both heads, with eight numbers in fp64 for each pair. All pairs of kLength would
  // take nine times as much on one rank.
  constexpr int64_t kDenseBlock = int64_t{256} * 1024 * 2 * 8 * 8;
  const std::vector<std::string> patterns = every_pattern(kLength), longer = every_pattern(2 * kLength);
  for (const KernelKind kernel : {KernelKind::kCpu, KernelKind::kEfficient, KernelKind::kReference}) {
    for (const double dropout : {0.0, 0.1}) {
      // The first calls of a process also hold what libraries keep from then on.
      peaks_of({patterns[0], kernel, dropout, 2}, kLength);
      for (size_t p = 0; p < patterns.size(); ++p) {
        for (const int ranks : {1, 2}) {
          if (dropout > 0 && ranks == 1) continue;  // two ranks compute all that one does
          MemoryCase c{patterns[p], kernel, dropout, ranks};
          Peaks most{ranks * kDenseBlock, ranks * kDenseBlock}, peaks = peaks_of(c, kLength);
          if (!in_dense_blocks(c)) {
            c.pattern = longer[p];
            most = std::exchange(peaks, peaks_of(c, 2 * kLength));
          }
          EXPECT_LT(peaks.resident, most.resident + kMatrix) << text_of(c);
          EXPECT_LT(peaks.allocated, most.allocated + kMatrix) << text_of(c);
        }
      }
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
