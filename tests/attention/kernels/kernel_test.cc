// Tests of CPU kernels on hand-made tiles: gathered, strided and banded tiles, blocks that hold only some batch rows
// and heads or are given call by call, logits far from zero, values that are not finite, dropout, threads, and polling.
// kernel_parts_test.cc tests the parts of kernels, choose_kernel_test.cc their choice.
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>

#include "attention/kernels/choose_kernel.h"
#include "attention/kernels/composed_kernel.h"
#include "attention/tiles/tile_views.h"
#include "common/error.h"
#include "common/simd/instruction_set.h"
#include "tests/attention/kernels/kernel_case.h"
#include "tests/attention/kernels/masked_operator.h"

namespace annulus::kernel_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

using testing::by_definition;
using testing::Case;
using testing::Expected;
using testing::MaskedOperator;
using testing::Result;
using testing::right;
using testing::run;
using testing::scattered;

const std::vector<KernelKind> kCpuKernels{KernelKind::kReference, KernelKind::kCpu, KernelKind::kEfficient};

// Tests run with one thread unless they set another number, so that they do not depend on the machine.
class Kernels : public ::testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }
};

TEST_F(Kernels, ScatteredTilesEqualTheDefinition) {
  for (const bool one_head : {false, true}) {
    for (const double rate : {0.0, 0.3}) {
      for (const at::ScalarType type : {at::kDouble, at::kFloat}) {
        Case c = scattered(type, one_head);
        c.call.dropout = {rate, 7, 3, 1, 5};
        const Expected want = by_definition(c);
        for (const KernelKind kind : kCpuKernels) EXPECT_TRUE(right(run(c, kind), c, want)) << to_string(kind);
      }
    }
  }
}

TEST_F(Kernels, ComposedOperatorsEqualTheDefinition) {
  const auto masked = [](bool any_band) { return std::make_shared<MaskedOperator>(any_band); };
  const std::vector<std::vector<std::shared_ptr<const AttentionOperator>>> lists = {
      {masked(true)}, {masked(false)}, {masked(false), masked(true)}};
  for (const bool one_head : {false, true}) {
    const Case c = scattered(at::kDouble, one_head);
    const Expected want = by_definition(c);
    for (const auto& operators : lists) {
      for (const auto& [gathered, fill] : {std::pair<int64_t, int64_t>{1 << 20, 1 << 20}, {1, 1}, {300, 4}}) {
        ComposedKernelOptions options;
        options.limits.most_gathered = gathered, options.limits.fill = fill;
        EXPECT_TRUE(right(run(c, [&] { return make_composed_kernel(operators, options); }), c, want))
            << one_head << " " << operators.size() << " " << gathered;
      }
    }
  }
}

// Every logit is near -3000 or 3000, so that its exponential is 0 or infinite. Every kernel, and the merging of pieces,
// must subtract a maximum of the logits that are present.
TEST_F(Kernels, LogitsFarFromZeroStayExact) {
  for (const double offset : {-3000.0, 3000.0}) {
    for (const bool one_head : {false, true}) {
      Case c = scattered(at::kDouble, one_head);
      c.q.select(3, 0).fill_(100);
      c.keys.k.select(3, 0).fill_(offset / 100 / c.call.scale);
      const Expected want = by_definition(c);
      for (const KernelKind kind : {KernelKind::kReference, KernelKind::kCpu, KernelKind::kEfficient}) {
        EXPECT_TRUE(right(run(c, kind), c, want)) << to_string(kind) << " " << offset;
      }
      for (const bool any_band : {false, true}) {
        for (const int64_t fill : {int64_t{1}, int64_t{1} << 20}) {
          ComposedKernelOptions options;
          options.limits.fill = fill;
          const auto made = [&] { return make_composed_kernel({std::make_shared<MaskedOperator>(any_band)}, options); };
          EXPECT_TRUE(right(run(c, made), c, want)) << "composed " << any_band << " " << fill << " " << offset;
        }
      }
    }
  }
}

// Uses a kernel as the executor does: one call for each block that has arrived, and gradients of several blocks.
Result run_tile_by_tile(const Case& c, const std::function<std::unique_ptr<Kernel>()>& make) {
  Result r;
  const auto block = [&] { return KeyBlock{c.keys.k.clone(), c.keys.v.clone(), c.keys.batch, c.keys.heads}; };
  const auto forward = make();
  forward->begin_forward(c.q, c.call);
  for (const Tile& tile : c.tiles) forward->forward(block(), {&tile, 1}, {});
  forward->finish_forward(r.out, r.lse);
  const auto backward = make();
  backward->begin_backward(c.dout, c.q, r.out.to(c.q.scalar_type()), r.lse, c.call);
  const std::vector<int64_t> shape{c.grad_batch.count, c.grad_rows, c.grad_heads.count, c.q.size(3)};
  const auto options = c.q.options().dtype(accumulator_type(c.q.scalar_type()));
  // Gradients are added to what these tensors hold, unless they are marked as fresh.
  r.dk = at::full(shape, 1.5, options), r.dv = at::full(shape, -2.5, options);
  at::Tensor fresh_k = at::full(shape, NAN, options), fresh_v = at::full(shape, NAN, options);
  for (size_t i = 0; i < c.tiles.size(); ++i) {
    const bool fresh = i == 0;
    if (i % 2 == 0) {
      backward->backward(block(), {fresh_k, fresh_v, c.grad_batch, c.grad_heads, fresh}, {&c.tiles[i], 1}, {});
    } else {
      backward->backward(block(), {r.dk, r.dv, c.grad_batch, c.grad_heads}, {&c.tiles[i], 1}, {});
    }
  }
  r.dk = r.dk - 1.5 + fresh_k, r.dv = r.dv + 2.5 + fresh_v;
  r.dq = backward->finish_backward();
  return r;
}

TEST_F(Kernels, BlocksGivenCallByCallEqualTheDefinition) {
  for (const bool one_head : {false, true}) {
    for (const double rate : {0.0, 0.3}) {
      Case c = scattered(at::kDouble, one_head);
      c.call.dropout = {rate, 7, 3, 1, 5};
      const Expected want = by_definition(c);
      for (const KernelKind kind : kCpuKernels) {
        const auto made = [&] { return make_kernel(kind, c.q); };
        EXPECT_TRUE(right(run_tile_by_tile(c, made), c, want)) << to_string(kind) << " " << one_head << " " << rate;
      }
    }
  }
}

// One call computes a whole block: fresh gradients are set, others are added to.
TEST_F(Kernels, CallOnAWholeBlockSetsOrAddsGradients) {
  Case c;
  const auto options = at::TensorOptions().dtype(at::kDouble);
  c.q = at::randn({2, 64, 4, 16}, options), c.dout = at::randn({2, 64, 4, 16}, options);
  c.keys = {at::randn({2, 64, 2, 16}, options), at::randn({2, 64, 2, 16}, options), {0, 1, 2}, {0, 1, 2}};
  c.grad_batch = c.grad_heads = {0, 1, 2}, c.grad_rows = 64;
  c.call.group = 2, c.call.scale = 0.25;
  Tile t;
  t.batch = {0, 1, 2}, t.heads = {0, 1, 4};
  t.query_rows = t.query_positions = t.key_rows = t.key_positions = t.grad_rows = {0, 1, 64};
  t.band.hi = 0;
  c.tiles = {t, t};
  c.tiles[1].band = {};
  const Expected want = by_definition(c);
  for (const bool any_band : {false, true}) {
    ComposedKernelOptions kernel_options;
    kernel_options.limits.fill = 1;
    const auto made = [&] {
      return make_composed_kernel({std::make_shared<MaskedOperator>(any_band)}, kernel_options);
    };
    EXPECT_TRUE(right(run_tile_by_tile(c, made), c, want)) << any_band;
    std::swap(c.tiles[0], c.tiles[1]);
    EXPECT_TRUE(right(run_tile_by_tile(c, made), c, want)) << any_band;
  }
  // 64 keys fill parts of the cpu kernel's register tiles, and 63 do not.
  for (const int64_t keys : {64, 63}) {
    for (Tile& tile : c.tiles) tile.key_rows = tile.key_positions = tile.grad_rows = {0, 1, keys};
    const Expected of_keys = by_definition(c);
    for (const KernelKind kind : kCpuKernels) {
      const auto made = [&] { return make_kernel(kind, c.q); };
      EXPECT_TRUE(right(run_tile_by_tile(c, made), c, of_keys)) << to_string(kind) << " " << keys;
    }
  }
}

// There are more keys than are multiplied at once and more rows than a block has. The running maxima change: later keys
// have larger scores in some rows and smaller ones in others. Runs of keys are long, or short and gathered. The rows of
// long ones are used where they are if they are whole vectors, which 32 elements are for every instruction set.
TEST_F(Kernels, LongRowsAndKeysEqualTheDefinition) {
  for (const int64_t i : {0, 1, 2, 3}) {
    const auto [type, dim] = std::pair(i % 2 == 0 ? at::kDouble : at::kFloat, i < 2 ? 8 : 32);
    Case c;
    const auto options = at::TensorOptions().dtype(type);
    const int64_t n = 400, m = 2100;
    c.q = at::randn({1, n, 2, dim}, options), c.dout = at::randn({1, n, 2, dim}, options);
    c.keys = {at::randn({1, m, 1, dim}, options), at::randn({1, m, 1, dim}, options), {0, 1, 1}, {0, 1, 1}};
    c.call.group = 2, c.call.scale = dim == 8 ? 0.7 : 0.35;
    c.q.select(3, 0).copy_(at::arange(n, options).sub(150).mul(0.07 / c.call.scale).view({1, n, 1}));
    c.keys.k.select(3, 0).copy_(at::arange(m, options).mul(0.003).view({1, m, 1}));
    c.grad_batch = c.grad_heads = {0, 1, 1}, c.grad_rows = m;
    const auto add = [&](Span queries, Span keys, Band band) {
      Tile t;
      t.batch = {0, 1, 1}, t.heads = {0, 1, 2};
      t.query_rows = t.query_positions = queries;
      t.key_rows = t.key_positions = t.grad_rows = keys;
      t.band = band;
      c.tiles.push_back(t);
    };
    add({0, 1, 280}, {0, 1, 1300}, {-Band::kUnbounded, 900});    // row 0 sees 901 keys, the last row sees all
    add({0, 1, 280}, {1300, 1, 700}, {1200, Band::kUnbounded});  // the first rows see all of them
    add({0, 1, 280}, {2000, 1, 100}, {1790, 1830});              // most rows see none
    for (int64_t k = 0; k < 60; ++k) add({280, 1, 10}, {k * 35, 1, 20 + k % 15}, {});
    add({300, 1, 100}, {350, 1, 200}, {-Band::kUnbounded, 0});  // the first 50 rows see no keys here or before
    const Expected want = by_definition(c);
    for (const int threads : {1, 3}) {  // the threads share one kv head and divide its keys
      at::set_num_threads(threads);
      for (const KernelKind kind : kCpuKernels) {
        if (dim != 8 && kind != KernelKind::kCpu) continue;  // the others treat rows of any length alike
        EXPECT_TRUE(right(run(c, kind), c, want))
            << to_string(kind) << " " << type << " " << dim << ", " << threads << " threads";
      }
    }
  }
}

// The first rows see three keys, the last rows three others that are computed together with those, and the rows in
// between see neither. All rows see the keys that are computed before.
TEST_F(Kernels, RowsBetweenThoseThatSeeKeysAddNothing) {
  for (const at::ScalarType type : {at::kDouble, at::kFloat}) {
    Case c = scattered(type, true, 5);
    const auto options = c.q.options();
    c.q = at::randn({1, 48, 2, 5}, options), c.dout = at::randn({1, 48, 2, 5}, options);
    c.keys = {at::randn({1, 262, 1, 5}, options), at::randn({1, 262, 1, 5}, options), {0, 1, 1}, {0, 1, 1}};
    c.grad_batch = c.grad_heads = {0, 1, 1}, c.grad_rows = 262;
    c.tiles.clear();
    const auto add = [&](Span rows, int64_t position, Band band) {
      Tile t;
      t.batch = {0, 1, 1}, t.heads = {0, 1, 2};
      t.query_rows = t.query_positions = {0, 1, 48};
      t.key_rows = t.grad_rows = rows, t.key_positions = {position, 1, rows.count};
      t.band = band;
      c.tiles.push_back(t);
    };
    add({0, 1, 256}, 0, {});
    add({256, 1, 3}, 0, {0, Band::kUnbounded});
    add({259, 1, 3}, 45, {-Band::kUnbounded, 0});
    EXPECT_TRUE(right(run(c, KernelKind::kCpu), c));
  }
}

// Each band shows exactly one pair of a block or hides exactly one.
TEST_F(Kernels, BandsThatShowOrHideOnePair) {
  Case c = scattered(at::kDouble, false);
  Tile t = c.tiles[0];
  t.query_rows = t.query_positions = {0, 1, 20}, t.key_rows = t.key_positions = {0, 1, 30}, t.grad_rows = {11, 1, 30};
  for (const Band band : {Band{29, Band::kUnbounded}, Band{-Band::kUnbounded, -19}, Band{-Band::kUnbounded, 28},
                          Band{-18, Band::kUnbounded}, Band{-18, 29}, Band{-19, 28}}) {
    c.tiles = {t};
    c.tiles[0].band = band;
    const Expected want = by_definition(c);
    for (const KernelKind kind : kCpuKernels) {
      EXPECT_TRUE(right(run(c, kind), c, want)) << to_string(kind) << " " << to_string(band);
    }
  }
}

TEST_F(Kernels, AnyHeadSizeAndPrecision) {
  for (const int64_t head_dim : {1, 5, 12, 40}) {
    for (const bool one_head : {false, true}) {
      const Case c = scattered(at::kDouble, one_head, head_dim);
      const Expected want = by_definition(c);
      for (const KernelKind kind : kCpuKernels) {
        EXPECT_TRUE(right(run(c, kind), c, want)) << to_string(kind) << " " << head_dim;
      }
    }
  }
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
    const Case c = scattered(type, false, 16);
    const Expected want = by_definition(c), in_fp32 = by_definition(moved(c, at::kCPU, at::kFloat));
    for (const KernelKind kind : kCpuKernels) {
      const Result got = run(c, kind);
      EXPECT_EQ(got.lse.scalar_type(), at::kFloat);
      EXPECT_TRUE(right(got, c, want)) << to_string(kind) << " " << type;
      // dv depends on no rounded value and is added up and returned in fp32, except where probabilities are multiplied
      // as bf16 (bf16_pairs_test.cc).
      const bool as_bf16 =
          type == at::kBFloat16 && kind == KernelKind::kCpu && instruction_set() >= InstructionSet::kAvx512Bf16;
      if (!as_bf16) {
        EXPECT_TRUE(as_exact(&OracleResult::dv, got.dv, in_fp32, at::kFloat)) << to_string(kind) << " " << type;
      }
    }
  }
}

// Non-finite values outside the band must not reach the result, as 0 times infinity would. One block holds such values
// and one does not.
TEST_F(Kernels, MaskedNonFiniteValuesDoNotLeak) {
  for (const at::ScalarType type : {at::kDouble, at::kFloat}) {
    Case c = scattered(type, false);
    Tile t = c.tiles[0];
    t.query_rows = t.query_positions = {64, 1, 100}, t.key_rows = t.key_positions = {100, 1, 90};
    t.grad_rows = {111, 1, 90}, t.band = {-Band::kUnbounded, 0};
    c.tiles = {t};
    Tile before = t;  // of a block in which all values are finite
    before.query_rows = before.query_positions = {0, 1, 10}, before.key_rows = before.key_positions = {0, 1, 10};
    before.grad_rows = {11, 1, 10};
    const Expected want = by_definition(c);
    // Rows up to 149 see no such value.
    const auto as_exact_for_blind = [&](at::Tensor OracleResult::*result, const at::Tensor& got) {
      const auto blind = [](const at::Tensor& rows) { return rows.defined() ? rows.narrow(1, 64, 86) : rows; };
      Expected of_blind = want;
      of_blind.*result = blind(want.*result), of_blind.usual.*result = blind(want.usual.*result);
      return as_exact(result, blind(got), of_blind, type);
    };
    for (const double value : {kInfinity, -kInfinity, std::nan("")}) {
      for (const bool keys_too : {false, true}) {
        Case holes = c;
        holes.keys.v = c.keys.v.clone(), holes.keys.v.narrow(1, 150, 26).fill_(value);
        if (keys_too) holes.keys.k = c.keys.k.clone(), holes.keys.k.narrow(1, 150, 26).fill_(value);
        for (const KernelKind kind : {KernelKind::kReference, KernelKind::kCpu}) {
          const auto forward = make_kernel(kind, c.q), backward = make_kernel(kind, c.q);
          Result got;
          forward->begin_forward(c.q, c.call);
          forward->forward(c.keys, {&before, 1}, {});
          forward->forward(holes.keys, {&t, 1}, {});
          forward->finish_forward(got.out, got.lse);
          EXPECT_TRUE(as_exact_for_blind(&OracleResult::out, got.out)) << to_string(kind) << value;
          const at::Tensor dk = at::zeros({3, c.grad_rows, 2, 8}, got.out.options()), dv = at::zeros_like(dk);
          const KeyBlock grads{dk, dv, c.grad_batch, c.grad_heads};
          backward->begin_backward(c.dout, c.q, got.out, got.lse, c.call);
          backward->backward(c.keys, grads, {&before, 1}, {});
          backward->backward(holes.keys, grads, {&t, 1}, {});
          EXPECT_TRUE(as_exact_for_blind(&OracleResult::dq, backward->finish_backward())) << to_string(kind) << value;
        }
      }
    }
  }
}

// Transfers make progress only when a kernel polls.
TEST_F(Kernels, PollsBetweenPieces) {
  Case c;
  const int64_t n = 2048;
  c.q = at::randn({1, n, 1, 64}), c.dout = at::randn({1, n, 1, 64});
  c.keys = {at::randn({1, n, 1, 64}), at::randn({1, n, 1, 64}), {0, 1, 1}, {0, 1, 1}};
  c.grad_batch = c.grad_heads = {0, 1, 1}, c.grad_rows = n;
  Tile t;
  t.batch = t.heads = {0, 1, 1};
  t.query_rows = t.query_positions = t.key_rows = t.key_positions = t.grad_rows = {0, 1, n};
  for (const auto& [kind, least] :
       {std::pair{KernelKind::kCpu, 3}, {KernelKind::kReference, 8}, {KernelKind::kEfficient, 1}}) {
    int polls = 0;
    const Kernel::Poll poll = [&polls] { ++polls; };
    const auto forward = make_kernel(kind, c.q), backward = make_kernel(kind, c.q);
    at::Tensor out, lse, dk = at::zeros_like(c.keys.k), dv = at::zeros_like(c.keys.v);
    forward->begin_forward(c.q, c.call);
    forward->forward(c.keys, std::vector<Tile>{t}, poll);
    forward->finish_forward(out, lse);
    EXPECT_GE(polls, least) << to_string(kind);
    polls = 0;
    backward->begin_backward(c.dout, c.q, out, lse, c.call);
    backward->backward(c.keys, {dk, dv, {0, 1, 1}, {0, 1, 1}}, std::vector<Tile>{t}, poll);
    EXPECT_GE(polls, least) << to_string(kind);
  }
}

TEST_F(Kernels, ResultOfASingleCallIsNotCopied) {
  Case c;
  c.q = at::randn({2, 64, 4, 16}), c.dout = at::randn({2, 64, 4, 16});
  c.keys = {at::randn({2, 64, 2, 16}), at::randn({2, 64, 2, 16}), {0, 1, 2}, {0, 1, 2}};
  c.call.group = 2;
  Tile t;
  t.batch = {0, 1, 2}, t.heads = {0, 1, 4};
  t.query_rows = t.query_positions = t.key_rows = t.key_positions = {0, 1, 64};
  t.band.hi = 0;
  // Records its last result.
  class Recorded : public MaskedOperator {
   public:
    Recorded() : MaskedOperator(true) {}
    Forward forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Band& band,
                    double scale) const override {
      result = MaskedOperator::forward(q, k, v, band, scale);
      return result;
    }
    mutable Forward result;
  };
  const auto recorded = std::make_shared<Recorded>();
  ComposedKernelOptions options;
  options.limits.fill = 1;
  const auto kernel = make_composed_kernel({recorded}, options);
  at::Tensor out, lse;
  kernel->begin_forward(c.q, c.call);
  kernel->forward(c.keys, std::vector<Tile>{t}, {});
  kernel->finish_forward(out, lse);
  EXPECT_EQ(out.data_ptr(), recorded->result.out.data_ptr());
  EXPECT_EQ(lse.data_ptr(), recorded->result.lse.data_ptr());
}

// A single row is padded with zeros to a tile of several rows, and 0 x inf is NaN.
TEST_F(Kernels, PaddingRowsIgnoreInfiniteKeys) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    Case c;
    const at::Tensor k = at::randn({1, 3, 1, 8}).to(type);
    c.q = at::ones({1, 1, 1, 8}, k.options()), c.dout = at::randn({1, 1, 1, 8}).to(type);
    k.select(1, 1).fill_(-kInfinity);
    c.keys = {k, at::randn({1, 3, 1, 8}).to(type), {0, 1, 1}, {0, 1, 1}};
    Tile t;
    t.batch = t.heads = {0, 1, 1};
    t.query_rows = t.query_positions = {0, 1, 1};
    t.key_rows = t.key_positions = t.grad_rows = {0, 1, 3};
    const auto kernel = make_kernel(KernelKind::kCpu, c.q);
    at::Tensor out, lse, dk = at::zeros_like(k, at::kFloat), dv = at::zeros_like(dk);
    kernel->begin_forward(c.q, c.call);
    kernel->forward(c.keys, std::vector<Tile>{t}, {});
    kernel->finish_forward(out, lse);
    EXPECT_TRUE(out.isfinite().all().item<bool>()) << type;
    kernel->begin_backward(c.dout, c.q, out.to(type), lse, c.call);
    kernel->backward(c.keys, {dk, dv, {0, 1, 1}, {0, 1, 1}}, std::vector<Tile>{t}, {});
    kernel->finish_backward();
    EXPECT_TRUE(dv.isfinite().all().item<bool>()) << type;
    for (const at::Tensor& grad : {dk, dv}) EXPECT_EQ(grad.select(1, 1).abs().max().item<float>(), 0) << type;
  }
}

TEST_F(Kernels, ResultIsIndependentOfTheThreadCount) {
  const Case c = scattered(at::kDouble, true);
  const Expected want = by_definition(c);
  for (const int threads : {1, 2, 5}) {
    at::set_num_threads(threads);
    for (const KernelKind kind : kCpuKernels) {
      EXPECT_TRUE(right(run(c, kind), c, want)) << to_string(kind) << " " << threads;
    }
  }
}

// Tiles outside the block of keys and outside the block of gradients.
TEST_F(Kernels, RefusesTilesOutsideTheirBlock) {
  const Case held = scattered(at::kFloat, false);
  const Span all{0, 1, 2}, second{1, 1, 1};
  for (const KernelKind kind : kCpuKernels) {
    run(held, kind);
    Case c = held;
    c.keys.k = c.keys.k.narrow(2, 1, 1), c.keys.v = c.keys.v.narrow(2, 1, 1), c.keys.heads = second;
    EXPECT_THROW(run(c, kind), Error) << to_string(kind) << ": kv head 0 is not held";
    c = held;
    c.keys.batch = all;
    EXPECT_THROW(run(c, kind), Error) << to_string(kind) << ": batch row 2 is not held";
    c = held;
    c.grad_heads = second;
    EXPECT_THROW(run(c, kind), Error) << to_string(kind) << ": the gradients of kv head 0 are not held";
    c = held;
    c.grad_batch = all;
    EXPECT_THROW(run(c, kind), Error) << to_string(kind) << ": the gradients of batch row 2 are not held";
  }
}

// Returns the peak memory of this process.
int64_t peak_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss * 1024;
}

TEST_F(Kernels, TakesNoQuadraticMemory) {
  Case c;
  const int64_t n = 4096;
  c.q = at::randn({1, n, 1, 8}), c.dout = at::randn({1, n, 1, 8});
  c.keys = {at::randn({1, n, 1, 8}), at::randn({1, n, 1, 8}), {0, 1, 1}, {0, 1, 1}};
  c.grad_batch = c.grad_heads = {0, 1, 1}, c.grad_rows = n;
  Tile t;
  t.batch = t.heads = {0, 1, 1};
  t.query_rows = t.query_positions = t.key_rows = t.key_positions = t.grad_rows = {0, 1, n};
  c.tiles = {t};
  for (const double rate : {0.0, 0.5}) {
    c.call.dropout.rate = rate;
    const int64_t before = peak_bytes();
    run(c, KernelKind::kCpu);
    EXPECT_LT(peak_bytes() - before, 2 * n * n) << rate;  // the scores of all pairs would take 4 n^2 bytes
  }
}

}  // namespace
}  // namespace annulus::kernel_test
