// Tests of attention that multiplies bf16 as bf16 (attention/kernels/cpu/bf16_pairs.cc): the packing of pairs and their
// products against LibTorch's, and the whole kernel against the definition, beside the one that computes in fp32. Where
// the processor has no such products, or ANNULUS_ISA forbids them, the kernel computes in fp32 and is tested alike;
// only the tests of packing and products are skipped.
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "attention/kernels/cpu/tile_math.h"
#include "tests/attention/kernels/kernel_case.h"
#include "tests/common/exactness.h"

namespace annulus::bf16_pairs_test {
namespace {

class Bf16Kernel : public ::testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }
};

class Bf16Pairs : public Bf16Kernel {
 protected:
  void SetUp() override {
    Bf16Kernel::SetUp();
    if (tile_math_of_pairs() == nullptr) GTEST_SKIP() << "no products of bf16 here";
    if (math().begin != nullptr) math().begin();
  }
  void TearDown() override {
    if (tile_math_of_pairs() != nullptr && math().end != nullptr) math().end();
  }
  const TileMath<float>& math() const { return *tile_math_of_pairs(); }
};

// Those of AMX, which multiplies whole tiles.
class Bf16Tiles : public Bf16Pairs {
 protected:
  void SetUp() override {
    Bf16Pairs::SetUp();
    if (tile_math_of_pairs() != nullptr && math().depth == 1) GTEST_SKIP() << "no AMX here";
  }
};

at::Tensor numbers(at::IntArrayRef sizes) { return at::randn(sizes).to(at::kBFloat16); }
StoredRows rows_of(const at::Tensor& x) { return {x.const_data_ptr(), x.stride(0), ElementType::kBFloat16}; }
int64_t padded(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
float* floats(const at::Tensor& x) { return x.data_ptr<float>(); }

// The elements of a tensor of pairs as bf16, with a last dimension of 2.
at::Tensor halves(const at::Tensor& pairs) {
  return pairs.clone(at::MemoryFormat::Contiguous).view(at::kBFloat16).unflatten(-1, {-1, 2});
}

TEST_F(Bf16Pairs, PackingPutsNeighboursTogether) {
  for (const int64_t dim : {2, 6, 16, 34, 80, 1030}) {
    const int64_t n = 5 + dim % 4, column = dim % 5, step = (dim + 15) / 16 * 16 + 16;
    const at::Tensor x = numbers({n, dim + 4}).narrow(1, 2, dim);

    const at::Tensor copied = at::full({n, step}, 7.0f);
    math().copy(rows_of(x), n, dim, 3.0f, floats(copied), step);
    EXPECT_TRUE(halves(copied).narrow(1, 0, dim / 2).reshape({n, dim}).equal(x)) << dim;
    EXPECT_TRUE(copied.narrow(1, dim / 2, step - dim / 2).eq(0).all().item<bool>()) << dim;

    const int64_t panel = math().panel, panels = (column + n + panel - 1) / panel;
    const int64_t length = padded(dim / 2, math().depth);
    const at::Tensor columns = at::full({panels, length, panel}, 7.0f);
    math().transpose(rows_of(x), n, dim, floats(columns), column);
    const at::Tensor in_order = columns.transpose(1, 2).reshape({panels * panel, length}).narrow(1, 0, dim / 2);
    EXPECT_TRUE(halves(in_order).narrow(0, column, n).reshape({n, dim}).equal(x)) << dim;
    EXPECT_TRUE(in_order.narrow(0, 0, column).eq(7).all().item<bool>()) << dim;
    EXPECT_TRUE(in_order.narrow(0, column + n, panels * panel - column - n).eq(7).all().item<bool>()) << dim;

    // In two calls, of which the second begins with the second row of a pair or with a new one.
    for (const int64_t first : {1, 2, 3}) {
      const at::Tensor stacked = at::full({n / 2 + 1, step}, 7.0f);
      math().stack(rows_of(x), first, dim, floats(stacked), step, 0);
      math().stack(rows_of(x.narrow(0, first, n - first)), n - first, dim, floats(stacked), step, first);
      const at::Tensor got = halves(stacked.narrow(0, 0, (n + 1) / 2)).transpose(1, 2).reshape({-1, step});
      EXPECT_TRUE(got.narrow(0, 0, n).narrow(1, 0, dim).equal(x)) << dim << " " << first;
      EXPECT_TRUE(got.narrow(1, dim, step - dim).eq(0).all().item<bool>()) << dim << " " << first;
      if (n % 2 == 1) {
        EXPECT_TRUE(got[n].eq(0).all().item<bool>()) << dim << " " << first;
      }
    }
  }
}

// Products of bf16 are exact in fp32 and only their sums are rounded, here and in LibTorch. A sum of n terms is off by
// at most gamma_n of the sum of their magnitudes (exactness.h), however it is added up. `math` may leave out numbers
// that are smaller than any normal one, which these are not.
::testing::AssertionResult as_sums(const at::Tensor& got, const at::Tensor& a, const at::Tensor& b,
                                   const at::Tensor& added = {}) {
  const auto product = [&](const auto& of) {
    const at::Tensor p = of(a).matmul(of(b));
    return added.defined() ? p + of(added) : p;
  };
  const auto exact = [](const at::Tensor& t) { return t.to(at::kDouble); };
  const double magnitudes = testing::largest(product([&](const at::Tensor& t) { return exact(t).abs(); }));
  const double n = static_cast<double>(a.size(1) + 2) * testing::unit_roundoff(at::kFloat);
  return testing::within(testing::error_of(got, product(exact)), n / (1 - n) * magnitudes);
}

void expect_products_equal_those_in_fp32(const TileMath<float>& math) {
  for (const int64_t dim : {2, 16, 48, 80, 128}) {
    const int64_t keys = 3 * math.panel, step = keys + math.lanes, rows = math.rows;
    const int64_t width = padded(dim, math.lanes), length = padded(dim / 2, math.depth);
    const at::Tensor a = numbers({rows, dim}), b = numbers({keys, dim});
    const at::Tensor left = at::zeros({rows, length}), columns = at::zeros({3, length, math.panel});
    math.copy(rows_of(a), rows, dim, 1, floats(left), length);
    math.transpose(rows_of(b), keys, dim, floats(columns), 0);
    const annulus::Run run{math.lanes, 3 * math.panel - math.lanes};
    const int64_t count = run.past - run.first;
    for (int64_t used = 1; used <= rows; ++used) {
      const at::Tensor s = at::full({rows, step}, 7.0f);
      math.scores(used, floats(left), length, floats(columns), length, run, floats(s), step);
      EXPECT_TRUE(as_sums(s.narrow(0, 0, used).narrow(1, run.first, count), a.narrow(0, 0, used),
                          b.narrow(0, run.first, count).t()))
          << dim << " " << used;
      EXPECT_TRUE(s.narrow(1, 0, run.first).eq(7).all().item<bool>()) << dim << " " << used;
      EXPECT_TRUE(s.narrow(1, run.past, step - run.past).eq(7).all().item<bool>()) << dim << " " << used;
    }

    const at::Tensor values = numbers({keys, dim}), stacked = at::zeros({keys / 2, width});
    math.stack(rows_of(values), keys, dim, floats(stacked), width, 0);
    const at::Tensor of_keys = numbers({rows, keys}).to(at::kFloat), keep = at::randn({rows});
    const at::Tensor narrowed = at::zeros({rows, step}), c = at::randn({rows, width}), sums = c.clone();
    c.narrow(1, dim, width - dim).zero_();
    const annulus::Run all{0, keys};
    math.narrow(rows, floats(of_keys), keys, &all, 1, floats(narrowed), step);
    const at::Tensor kept = (c.to(at::kDouble) * keep.unsqueeze(1)).narrow(1, 0, dim);
    for (int64_t used = 1; used <= rows; ++used) {
      sums.copy_(c);
      math.add_product(used, floats(narrowed), step, 1, floats(stacked), width, keys / 2, floats(sums), width, width,
                       floats(keep), false);
      const auto first = [&](const at::Tensor& t) { return t.narrow(0, 0, used); };
      EXPECT_TRUE(as_sums(first(sums).narrow(1, 0, dim), first(of_keys), values, first(kept))) << dim << " " << used;
      sums.fill_(NAN);
      math.add_product(used, floats(narrowed), step, 1, floats(stacked), width, keys / 2, floats(sums), width, width,
                       nullptr, true);
      EXPECT_TRUE(as_sums(first(sums).narrow(1, 0, dim), first(of_keys), values)) << dim << " " << used;
    }

    // The sum over the rows of a tile, for as many of its columns as a tile has rows.
    const at::Tensor zipped = numbers({rows, keys}).to(at::kFloat), of_rows = numbers({rows, dim});
    const at::Tensor columns_of_rows = zipped.narrow(1, 4, rows).t().clone();
    const at::Tensor operand = at::zeros({rows / 2, width}), got = at::zeros({rows, width});
    math.stack(rows_of(of_rows), rows, dim, floats(operand), width, 0);
    math.zip(rows, floats(zipped), keys, keys);
    math.add_product(math.rows, floats(zipped) + 4, 1, 2 * keys, floats(operand), width, rows / 2, floats(got), width,
                     width, nullptr, false);
    EXPECT_TRUE(as_sums(got.narrow(1, 0, dim), columns_of_rows, of_rows)) << dim;
  }
}

TEST_F(Bf16Pairs, ProductsEqualThoseInFp32) { expect_products_equal_those_in_fp32(math()); }
TEST_F(Bf16Tiles, ProductsEqualThoseInFp32) { expect_products_equal_those_in_fp32(math()); }

TEST_F(Bf16Tiles, PanelsAreFilledUpWithZeros) {
  for (const int64_t dim : {2, 30, 32, 80}) {
    const int64_t length = padded(dim / 2, math().depth), panel = math().panel, n = panel + 5, column = 3;
    const at::Tensor columns = at::full({2, length, panel}, 7.0f);
    math().transpose(rows_of(numbers({n, dim})), n, dim, floats(columns), column);
    const at::Tensor rest = columns.transpose(1, 2).reshape({2 * panel, length}).narrow(1, dim / 2, length - dim / 2);
    EXPECT_TRUE(rest.narrow(0, column, n).eq(0).all().item<bool>()) << dim;
    EXPECT_TRUE(rest.narrow(0, 0, column).eq(7).all().item<bool>()) << dim;
  }
}

// The runs do not touch, and the first one's result may be written over its numbers.
TEST_F(Bf16Pairs, NarrowingAndZippingRoundToNearest) {
  const int64_t rows = math().rows, columns = 8 * math().lanes;
  const at::Tensor x = at::randn({rows, columns}) * 100;
  x.select(0, 0)[0] = INFINITY, x.select(0, 0)[1] = -INFINITY, x.select(0, 1)[2] = NAN;
  x.select(0, 2)[0] = 1.00390625f, x.select(0, 2)[1] = 1.01171875f;  // halfway: to the even neighbour
  const at::Tensor want = x.to(at::kBFloat16);
  const auto equal = [](const at::Tensor& a, const at::Tensor& b) {
    return a.isnan().equal(b.isnan()) && a.nan_to_num(0).equal(b.nan_to_num(0));
  };
  const std::vector<annulus::Run> runs{{0, 3 * math().lanes}, {5 * math().lanes, 7 * math().lanes}};
  for (const bool in_place : {false, true}) {
    const at::Tensor from = x.clone(), to = in_place ? from : at::zeros_like(x);
    math().narrow(rows, floats(from), columns, runs.data(), 2, floats(to), columns);
    const at::Tensor got = halves(to).reshape({rows, 2 * columns});
    for (const annulus::Run& run : runs) {
      const int64_t n = run.past - run.first;
      EXPECT_TRUE(equal(got.narrow(1, run.first, n), want.narrow(1, run.first, n))) << in_place << " " << run.first;
    }
  }
  const at::Tensor zipped = x.clone();
  math().zip(rows, floats(zipped), columns, columns);
  const at::Tensor got = halves(zipped.slice(0, 0, rows, 2)).transpose(1, 2).reshape({rows, columns});
  EXPECT_TRUE(equal(got, want));
}

using testing::by_definition;
using testing::Case;
using testing::Expected;
using testing::Result;
using testing::right;
using testing::run;
using testing::scattered;

// The same numbers where pairs of a row cannot be read at once.
at::Tensor at_odd_offset(const at::Tensor& x) {
  const at::Tensor storage = at::empty({x.numel() + 1}, x.options());
  return storage.narrow(0, 1, x.numel()).view(x.sizes()).copy_(x);
}

// Gathered, strided and banded tiles, whose chunks of keys join runs of odd lengths. dv tells the two ways apart: it is
// fp32, and p is rounded where it is multiplied as bf16.
TEST_F(Bf16Kernel, EqualsTheDefinition) {
  for (const int64_t dim : {2, 8, 40, 64, 128}) {
    for (const bool one_head : {false, true}) {
      for (const double rate : {0.0, 0.3}) {
        Case c = scattered(at::kBFloat16, one_head, dim);
        c.call.dropout = {rate, 7, 3, 1, 5};
        const Expected want = by_definition(c), in_fp32 = by_definition(moved(c, at::kCPU, at::kFloat));
        const std::string where = std::to_string(dim) + " " + std::to_string(rate);
        const Result pairs = run(c, KernelKind::kCpu);
        EXPECT_TRUE(right(pairs, c, want)) << where;
        // Gradients that hold nothing are set instead of added to.
        const at::Tensor dk = at::full(pairs.dk.sizes(), NAN, pairs.dk.options()), dv = dk.clone();
        const auto kernel = make_kernel(KernelKind::kCpu, c.q);
        kernel->begin_backward(c.dout, c.q, pairs.out.to(at::kBFloat16), pairs.lse, c.call);
        kernel->backward(c.keys, {dk, dv, c.grad_batch, c.grad_heads, true}, c.tiles, {});
        EXPECT_TRUE(as_exact(&OracleResult::dk, dk, want, at::kBFloat16)) << where;
        EXPECT_TRUE(as_exact(&OracleResult::dv, dv, want, at::kBFloat16)) << where;
        c.q = at_odd_offset(c.q);
        const Result wide = run(c, KernelKind::kCpu);
        const auto dv_as_in_fp32 = [&](const Result& got) {
          return as_exact(&OracleResult::dv, got.dv, in_fp32, at::kFloat);
        };
        EXPECT_EQ(bool(dv_as_in_fp32(pairs)), tile_math_of_pairs() == nullptr) << where;
        EXPECT_TRUE(dv_as_in_fp32(wide)) << where;
      }
    }
  }
}

// Keys up to and beyond the edges of chunks and register tiles, and query rows that fill no tile.
TEST_F(Bf16Kernel, LengthsAroundEveryEdge) {
  for (const int64_t keys : {1, 2, 15, 17, 33, 255, 256, 257, 515}) {
    for (const int64_t queries : {1, 11, 13, 49}) {
      Case c;
      const auto draw = [](int64_t n) { return at::randn({1, n, 1, 16}).to(at::kBFloat16); };
      c.q = draw(queries), c.dout = draw(queries);
      c.keys = {draw(keys), draw(keys), {0, 1, 1}, {0, 1, 1}};
      c.grad_batch = c.grad_heads = {0, 1, 1}, c.grad_rows = keys;
      c.call.scale = 0.3;
      Tile tile;
      tile.batch = tile.heads = {0, 1, 1};
      tile.query_rows = tile.query_positions = {0, 1, queries};
      tile.key_rows = tile.key_positions = tile.grad_rows = {0, 1, keys};
      for (const int64_t hi : {int64_t{0}, keys / 2, Band::kUnbounded}) {
        tile.band = {-Band::kUnbounded, hi};
        c.tiles = {tile};
        EXPECT_TRUE(right(run(c, KernelKind::kCpu), c)) << queries << " " << keys;
      }
    }
  }
}

// As with numbers, the exponents beyond which products overflow are those of fp32, and NaN reaches what it concerns.
TEST_F(Bf16Kernel, HugeNumbersAndNaNBehaveAsInFp32) {
  Case c = scattered(at::kBFloat16, false, 16);
  c.q.select(3, 0).fill_(1e4), c.keys.k.select(3, 0).fill_(1e4);
  const Result got = run(c, KernelKind::kCpu);
  EXPECT_TRUE(as_exact(&OracleResult::lse, got.lse, by_definition(c), at::kBFloat16));
  EXPECT_TRUE(got.out.isfinite().all().item<bool>());
  c = scattered(at::kBFloat16, false, 16);
  c.q.select(1, 5).fill_(std::numeric_limits<float>::quiet_NaN());
  const Result wide = [&] {
    Case odd = c;
    odd.q = at_odd_offset(c.q);
    return run(odd, KernelKind::kCpu);
  }();
  EXPECT_TRUE(run(c, KernelKind::kCpu).out.isnan().equal(wide.out.isnan()));
  EXPECT_TRUE(wide.out.isnan().any().item<bool>());
}

// Every query's largest score is that of key m / 2, about dim * scale * 4^exponent, and those of the others are half as
// large. Values and dout are small integers, of which all sums are exact.
Case one_key_of(int64_t m, int64_t dim, int exponent, at::ScalarType type) {
  Case c;
  const auto options = at::TensorOptions().dtype(type);
  const int64_t n = 13;
  const auto integers = [&](int64_t rows) { return at::randint(-4, 5, {1, rows, 1, dim}, options); };
  const at::Tensor size = at::arange(n, at::kDouble).mul(0.05).add(1.3).mul(std::ldexp(1.0, exponent));
  c.q = size.view({1, n, 1, 1}).expand({1, n, 1, dim}).to(type), c.dout = integers(n);
  c.keys = {at::full({1, m, 1, dim}, std::ldexp(0.65, exponent), options), integers(m), {0, 1, 1}, {0, 1, 1}};
  c.keys.k.select(1, m / 2).mul_(2);
  c.grad_batch = c.grad_heads = {0, 1, 1}, c.grad_rows = m;
  c.call.scale = 1 / std::sqrt(static_cast<double>(dim));
  Tile tile;
  tile.batch = tile.heads = {0, 1, 1};
  tile.query_rows = tile.query_positions = {0, 1, n};
  tile.key_rows = tile.key_positions = tile.grad_rows = {0, 1, m};
  c.tiles = {tile};
  return c;
}

// The probability of the largest score is 1, however large it is, and that of the others is 0. The scales of most head
// sizes are no powers of two, so that scores are rounded.
TEST_F(Bf16Kernel, ScoresOfAnySizeChooseTheirKey) {
  const auto wide = [](const at::Tensor& x) { return x.to(at::kDouble); };
  const auto expect_chosen = [&](const Case& c, KernelKind kind, const std::string& where) {
    const int64_t chosen = c.keys.k.size(1) / 2, dim = c.q.size(3);
    const Result got = run(c, kind);
    const at::Tensor scores = (wide(c.q) * wide(c.keys.k.narrow(1, chosen, 1))).sum(-1) * c.call.scale;
    const double nu = static_cast<double>(dim + 2) * testing::unit_roundoff(got.lse.scalar_type());  // exactness.h
    EXPECT_TRUE(testing::within(testing::error_of(got.lse.view({-1}), scores.view({-1})),
                                nu / (1 - nu) * testing::largest(scores)))
        << where;
    EXPECT_TRUE(wide(got.out).equal(wide(c.keys.v.narrow(1, chosen, 1).expand_as(c.q)))) << where;
    const at::Tensor dv = at::zeros_like(wide(got.dv));
    dv.select(1, chosen).copy_(wide(c.dout).sum(1));
    EXPECT_TRUE(wide(got.dv).equal(dv)) << where;
    EXPECT_TRUE(got.dq.eq(0).all().item<bool>() && got.dk.eq(0).all().item<bool>()) << where;
  };
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf, at::kFloat, at::kDouble}) {
    for (const int64_t dim : {10, 64, 80}) {
      for (const int exponent : {0, 6, 12, 14, 16, 17, 18, 24, 36, 58}) {
        if (type == at::kHalf && exponent > 14) continue;  // would be infinite
        for (const int64_t keys : {1, 300}) {
          if (keys > 1 && exponent < 4) continue;  // the others' probabilities are not 0 yet
          for (const KernelKind kind : {KernelKind::kCpu, KernelKind::kReference}) {
            expect_chosen(one_key_of(keys, dim, exponent, type), kind,
                          std::string(toString(type)) + " " + std::to_string(dim) + ", " + std::to_string(keys) +
                              " keys, 2^" + std::to_string(exponent) + " " + std::string(to_string(kind)));
          }
        }
      }
    }
  }
}

// The rows that fill up a tile behind the last query hold nothing of an earlier block.
TEST_F(Bf16Tiles, NaNStayInTheirBlock) {
  Case c;
  const auto draw = [](int64_t n) { return at::randn({2, n, 1, 16}).to(at::kBFloat16); };
  c.q = draw(32), c.dout = draw(32);
  c.keys = {draw(40), draw(40), {0, 1, 2}, {0, 1, 1}};
  c.grad_batch = {0, 1, 2}, c.grad_heads = {0, 1, 1}, c.grad_rows = 40;
  c.call.scale = 0.3;
  for (const int64_t batch : {0, 1}) {
    Tile tile;
    tile.batch = {batch, 1, 1}, tile.heads = {0, 1, 1};
    tile.query_rows = tile.query_positions = {0, 1, batch == 0 ? 32 : 3};
    tile.key_rows = tile.key_positions = tile.grad_rows = {0, 1, 40};
    c.tiles.push_back(tile);
  }
  for (const at::Tensor& x : {c.q, c.dout}) x.select(0, 0).fill_(std::numeric_limits<float>::quiet_NaN());
  const Result got = run(c, KernelKind::kCpu);
  EXPECT_TRUE(got.dk.select(0, 0).isnan().all().item<bool>());
  const Expected want = by_definition(c);
  for (at::Tensor OracleResult::*result : {&OracleResult::dk, &OracleResult::dv}) {
    Expected of_second = want;
    for (OracleResult* r : {static_cast<OracleResult*>(&of_second), &of_second.usual, &of_second.terms}) {
      r->*result = (r->*result).select(0, 1);
    }
    EXPECT_TRUE(as_exact(result, (got.*result).select(0, 1), of_second, at::kBFloat16));
  }
}

}  // namespace
}  // namespace annulus::bf16_pairs_test
