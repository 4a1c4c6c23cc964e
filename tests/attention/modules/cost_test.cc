// Tests of what MultiheadAttention does not compute needlessly: rotary tables are cached, and nothing is divided by 1.
#include <ATen/ops/randn.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>

#include "attention/modules/multihead_attention.h"
#include "attention/modules/rotary.h"
#include "comm/threads/threads.h"
#include "memory/caches.h"
#include "tests/attention/modules/operator_counter.h"
#include "tests/attention/modules/small_module.h"

namespace annulus::cost_test {
namespace {

CacheStats table_stats() {
  for (const CacheReport& report : cache_reports()) {
    if (report.name == "rotary tables") return report.stats;
  }
  ADD_FAILURE() << "no such cache";
  return {};
}

using testing::made;
using testing::OperatorCounter;
using testing::small;

TEST(MultiheadAttention, MakesRotaryTablesOnceForAllLayersAndForwards) {
  MultiheadAttentionOptions o = small();
  o.rotary_base = 777;  // no other test uses it
  const MultiheadAttention first = made(o), second = made(o);
  const at::Tensor x = at::randn({1, 23, 12}, at::kDouble);
  const auto self = make_self_communicator();
  const auto tables_made_by = [](const std::function<void()>& run) {
    const CacheStats before = table_stats();
    const OperatorCounter cosines("aten::cos");
    run();
    EXPECT_EQ(cosines.count(), table_stats().misses - before.misses);
    return cosines.count();
  };
  EXPECT_EQ(tables_made_by([&] { first->forward(x, {.comm = *self}); }), 1) << "keys use the table of the queries";
  EXPECT_EQ(tables_made_by([&] {
              for (int step = 0; step < 3; ++step) second->forward(first->forward(x, {.comm = *self}), {.comm = *self});
            }),
            0);
  // A table that was made in inference also serves training.
  o.rotary_base = 778;
  const MultiheadAttention third = made(o);
  EXPECT_EQ(tables_made_by([&] {
              const c10::InferenceMode inference;
              third->forward(x, {.comm = *self});
            }),
            1);
  EXPECT_EQ(tables_made_by([&] { third->forward(x, {.comm = *self}).sum().backward(); }), 0);
  // A change of anything that tables depend on makes another table.
  const auto other = [&](const std::function<void(MultiheadAttentionOptions&)>& change, int64_t length,
                         int64_t offset = 0, at::ScalarType type = at::kDouble) {
    MultiheadAttentionOptions changed = o;
    change(changed);
    MultiheadAttention m = made(changed);
    m->to(type);
    const at::Tensor input = at::randn({1, length, 12}).to(type);
    return tables_made_by([&] { m->forward(input, {.comm = *self, .query_offset = offset}); });
  };
  const auto none = [](MultiheadAttentionOptions&) {};
  EXPECT_EQ(other([](MultiheadAttentionOptions& c) { c.dropout = 0.1, c.norm = true, c.heads = 6; }, 23), 0);
  EXPECT_EQ(other([](MultiheadAttentionOptions& c) { c.rotary_base = 778.0000001; }, 23), 1);
  EXPECT_EQ(other([](MultiheadAttentionOptions& c) { c.head_dim = 4; }, 23), 1);
  EXPECT_EQ(other(none, 22), 1);
  EXPECT_EQ(other(none, 23, 4), 1) << "only the table of the queries is new";
  EXPECT_EQ(other(none, 23, 0, at::kFloat), 1);
  EXPECT_LE(table_stats().bytes, table_stats().capacity);
}

TEST(MultiheadAttention, RecomputationSkipsDivisionByOne) {
  MultiheadAttentionOptions o = small();
  o.recompute = true;
  const auto self = make_self_communicator();
  const at::Tensor x = at::randn({1, 17, 12}, at::kDouble), dout = at::randn({1, 17, 12}, at::kDouble);
  for (const bool mean : {false, true}) {
    if (mean) {
      o.pattern = parse_pattern(
          "{ kind = 'dilated', segment_lengths = [4, 8], dilation_rates = [1, 1], combine = 'mean' }", "test");
    }
    const MultiheadAttention m = made(o);
    const at::Tensor a = x.clone().requires_grad_();
    const OperatorCounter divisions("aten::div");
    const at::Tensor out = m->forward(a, {.comm = *self});
    const int forward = divisions.count();
    torch::autograd::grad({out}, {a}, {dout});
    EXPECT_EQ(forward > 0, mean);
    EXPECT_EQ(divisions.count() > forward, mean);
  }
}

}  // namespace
}  // namespace annulus::cost_test
