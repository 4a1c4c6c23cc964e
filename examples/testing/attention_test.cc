// Tests attention.h: what no one would think of is drawn.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <cstddef>
#include <vector>

#include "annulus/testing/any_pattern.h"
#include "attention.h"

namespace {

using annulus::AttentionShape;

// Whether attention over 3 ranks is what the definition gives.
bool is_by_definition(const annulus::PatternSpec& pattern, const AttentionShape& shape) {
  constexpr int kRanks = 3;
  constexpr double kScale = 0.25;
  const at::Generator generator = at::detail::createCPUGenerator(7);
  const auto drawn = [&](int64_t length, int64_t heads) {
    return at::randn({shape.batch, length, heads, 16}, generator, at::kDouble);
  };
  const at::Tensor q = drawn(shape.q_len, shape.heads), dout = drawn(shape.q_len, shape.heads);
  const at::Tensor k = drawn(shape.k_len, shape.kv_heads), v = drawn(shape.k_len, shape.kv_heads);
  const annulus::Count count = annulus::count_of(pattern, shape);
  std::vector<at::Tensor> parts(kRanks);
  annulus::run_ranks(kRanks, [&](annulus::Communicator& comm) {
    const auto part = [&](const at::Tensor& t) {
      return t.narrow(1, comm.rank() * t.size(1) / kRanks, t.size(1) / kRanks);
    };
    parts[static_cast<size_t>(comm.rank())] = ring_attention(comm, part(q), part(k), part(v), kScale, count);
  });
  return at::allclose(at::cat(parts, 1), annulus::oracle(q, k, v, dout, kScale, count).out, 1e-10, 1e-12);
}

}  // namespace

TEST(RingAttention, IsCausal) { EXPECT_TRUE(is_by_definition(annulus::causal_pattern(), {1, 2, 1, 48, 48})); }

TEST(RingAttention, IsByDefinitionForAnyPattern) {
  EXPECT_TRUE(rc::check([] {
    const AttentionShape shape{1, 2, 1, 48, 48};
    const annulus::PatternSpec pattern = annulus::testing::any_pattern(shape);
    RC_LOG() << "the pattern is " << pattern.text() << "\n";
    RC_ASSERT(is_by_definition(pattern, shape));
  }));
}
