// Tests of the vector code of flash attention on CPUs (attention/kernels/cpu/tile_math.h): packing, products, hidden
// columns, softmax and its gradient, and exponentials.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/clamp_max.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/masked_fill.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "attention/kernels/cpu/tile_math.h"
#include "tests/common/exactness.h"

namespace annulus::tile_math_test {
namespace {

using testing::error_of;
using testing::largest;
using testing::unit_roundoff;
using testing::within;

// Exponentials are within two units in the last place, each of which is up to two roundings.
constexpr double kOfExp = 4;

template <typename T>
class TileMathOf : public ::testing::Test {
 protected:
  static constexpr at::ScalarType kType = std::is_same_v<T, double> ? at::kDouble : at::kFloat;
  // How far a result may be from one in fp64 that errs as much, after n roundings of at most `magnitude`. A sum of n
  // products is off by at most gamma_n of the sum of their magnitudes, in any order (exactness.h).
  static double bound(double n, double magnitude) {
    const double nu = n * unit_roundoff(kType);
    return 2 * nu / (1 - nu) * magnitude;
  }
  static at::Tensor exact(const at::Tensor& t) { return t.to(at::kDouble); }
  const TileMath<T>& math = tile_math<T>();
  at::Tensor draw(at::IntArrayRef sizes) { return at::randn(sizes, at::TensorOptions().dtype(kType)); }
  static StoredRows rows(const at::Tensor& x) {
    const at::ScalarType type = x.scalar_type();
    return {x.const_data_ptr(), x.stride(0),
            type == at::kDouble     ? ElementType::kDouble
            : type == at::kBFloat16 ? ElementType::kBFloat16
            : type == at::kHalf     ? ElementType::kHalf
                                    : ElementType::kFloat};
  }
  std::vector<at::ScalarType> stored() const {
    if (kType == at::kDouble) return {at::kDouble};
    return {at::kFloat, at::kBFloat16, at::kHalf};
  }
};
using Computed = ::testing::Types<float, double>;
TYPED_TEST_SUITE(TileMathOf, Computed);

// Every storage dtype, strided, with sizes around multiples of a vector; columns begin anywhere.
TYPED_TEST(TileMathOf, PacksRowsAndColumns) {
  using T = TypeParam;
  for (const at::ScalarType type : this->stored()) {
    for (const int64_t dim : {1, 3, 4, 15, 16, 33, 80, 513, 514, 84, 36, 20}) {
      // The last sizes have columns that are transposed several at a time.
      const bool many = dim % 2 == 0;
      const int64_t n = many ? 39 : 1 + dim % 7, column = many ? dim % 16 : dim % 5, width = (dim + 15) / 16 * 16;
      const at::Tensor x = this->draw({n, dim + 3}).to(type).narrow(1, 1, dim);
      const at::Tensor wide = x.to(this->kType), copied = at::full({n, width}, 7, wide.options());
      this->math.copy(this->rows(x), n, dim, T{2}, copied.template data_ptr<T>(), width);
      EXPECT_TRUE(copied.narrow(1, 0, dim).equal(2 * wide)) << type << " " << dim;
      EXPECT_EQ(copied.narrow(1, dim, width - dim).abs().sum().template item<double>(), 0) << dim;
      const int64_t panel = this->math.panel, panels = (column + n + panel - 1) / panel;
      const at::Tensor columns = at::full({panels, dim, panel}, 7, wide.options());
      this->math.transpose(this->rows(x), n, dim, columns.template data_ptr<T>(), column);
      const at::Tensor in_order = columns.transpose(1, 2).reshape({panels * panel, dim});
      EXPECT_TRUE(in_order.narrow(0, column, n).equal(wide)) << type << " " << dim;
      EXPECT_TRUE(in_order.narrow(0, 0, column).eq(7).all().template item<bool>()) << dim;
      EXPECT_TRUE(in_order.narrow(0, column + n, panels * panel - column - n).eq(7).all().template item<bool>()) << dim;
    }
  }
}

// One infinite or NaN element anywhere is found, and rows outside of what is asked for do not matter. The largest
// numbers, whose sum overflows, are finite.
TYPED_TEST(TileMathOf, FindsElementsThatAreNotFinite) {
  for (const at::ScalarType type : this->stored()) {
    for (const int64_t dim : {1, 4, 15, 16, 33, 50, 97}) {
      const int64_t n = 3;
      const double most = type == at::kHalf ? 65504 : type == at::kDouble ? 1e308 : 3e38;
      const at::Tensor around = at::full({n + 2, dim + 2}, NAN, at::TensorOptions().dtype(type));
      const at::Tensor x = around.narrow(0, 1, n).narrow(1, 1, dim).fill_(most);
      EXPECT_TRUE(this->math.finite(this->rows(x), n, dim)) << type << " " << dim;
      for (int64_t i = 0; i < n * dim; ++i) {
        for (const float wrong : {INFINITY, -INFINITY, NAN}) {
          x[i / dim][i % dim].fill_(wrong);
          EXPECT_FALSE(this->math.finite(this->rows(x), n, dim)) << type << " " << dim << " " << i << " " << wrong;
        }
        x[i / dim][i % dim].fill_(-most);
      }
      EXPECT_TRUE(this->math.finite(this->rows(x), n, dim)) << type << " " << dim;
    }
  }
}

TYPED_TEST(TileMathOf, MultipliesTiles) {
  using T = TypeParam;
  const TileMath<T>& math = this->math;
  for (const int64_t dim : {1, 16, 32, 48, 80, 128}) {
    const int64_t keys = 3 * math.panel, padded = (dim + math.lanes - 1) / math.lanes * math.lanes;
    const at::Tensor a = this->draw({math.rows, dim}), b = this->draw({keys, dim});
    const at::Tensor columns = at::zeros({3, dim, math.panel}, a.options());
    math.transpose(this->rows(b), keys, dim, columns.template data_ptr<T>(), 0);
    const Run run{math.lanes, 2 * math.panel + math.lanes};
    const at::Tensor want = at::full({math.rows, keys}, 7, at::kDouble);
    const auto inside = [&](const at::Tensor& t) { return t.narrow(1, run.first, run.past - run.first); };
    inside(want).copy_(inside(this->exact(a).matmul(this->exact(b).t())));
    const double magnitude = largest(this->exact(a).abs().matmul(this->exact(b).abs().t()));
    for (int64_t used = 1; used <= math.rows; ++used) {
      const at::Tensor s = at::full({math.rows, keys}, 7, a.options());
      math.scores(used, a.template data_ptr<T>(), dim, columns.template data_ptr<T>(), dim, run,
                  s.template data_ptr<T>(), keys);
      const int64_t third = math.rows / 3, computed = (used + third - 1) / third * third;
      const auto first = [&](const at::Tensor& t) { return t.narrow(0, 0, used); };
      EXPECT_TRUE(within(error_of(first(s), first(want)), this->bound(dim, magnitude))) << dim << " " << used;
      EXPECT_TRUE(s.narrow(0, computed, math.rows - computed).eq(7).all().template item<bool>()) << used;
    }

    const at::Tensor v = this->draw({keys, padded}), keep = this->draw({math.rows});
    for (const int form : {0, 1, 2}) {  // scales what is there, adds to it, sets it
      const bool transposed = form > 0, set = form == 2;
      const at::Tensor left = this->draw({math.rows, keys}), c = this->draw({math.rows, padded});
      const at::Tensor stored = transposed ? left.t().contiguous() : left;
      const at::Tensor wide = this->exact(left), values = this->exact(v);
      const at::Tensor there =
          set ? at::zeros_like(c, at::kDouble) : this->exact(transposed ? c : c.to(at::kDouble) * keep.unsqueeze(1));
      const at::Tensor sum = wide.matmul(values) + there;
      const double magnitudes = largest(wide.abs().matmul(values.abs()) + there.abs());
      if (set) c.fill_(NAN);
      for (int64_t used = 1; used <= math.rows; ++used) {
        const at::Tensor got = c.clone();
        math.add_product(used, stored.template data_ptr<T>(), transposed ? 1 : keys, transposed ? math.rows : 1,
                         v.template data_ptr<T>(), padded, keys, got.template data_ptr<T>(), padded, padded,
                         transposed ? nullptr : keep.template data_ptr<T>(), set);
        const int64_t third = math.rows / 3, computed = (used + third - 1) / third * third, rest = math.rows - computed;
        EXPECT_TRUE(within(error_of(got.narrow(0, 0, used), sum.narrow(0, 0, used)), this->bound(keys + 2, magnitudes)))
            << dim << " " << used;
        const at::Tensor others = got.narrow(0, computed, rest), before = c.narrow(0, computed, rest);
        EXPECT_TRUE(set ? others.isnan().all().template item<bool>() : others.equal(before)) << dim << " " << used;
      }
    }
  }
}

// Rows hide none, some or many vectors, and a run whose end lies before its beginning hides nothing.
TYPED_TEST(TileMathOf, HidesColumns) {
  using T = TypeParam;
  const TileMath<T>& math = this->math;
  const int64_t columns = 6 * math.panel;
  std::vector<int64_t> from, past;
  for (int64_t r = 0; r < math.rows; ++r) {
    from.push_back(r * 7 % 11);
    past.push_back(r % 4 == 3 ? from.back() - 2 : from.back() + r * r % (5 * math.panel));
  }
  for (int64_t used = 0; used <= math.rows; ++used) {
    const at::Tensor s = this->draw({math.rows, columns}), want = s.clone();
    for (int64_t r = 0; r < used; ++r) {
      const int64_t first = from[static_cast<size_t>(r)], end = past[static_cast<size_t>(r)];
      if (first < end) want[r].narrow(0, first, end - first).fill_(-INFINITY);
    }
    math.hide(used, s.template data_ptr<T>(), columns, from.data(), past.data());
    EXPECT_TRUE(s.equal(want)) << used;
  }
}

// Bits belong to columns, whatever the vectors of the instruction set are, and columns outside the runs stay.
TYPED_TEST(TileMathOf, HidesColumnsWithoutABit) {
  using T = TypeParam;
  const TileMath<T>& math = this->math;
  const int64_t columns = 256, words = columns / 64 + 1;
  std::vector<uint64_t> shown(static_cast<size_t>(math.rows * words));
  for (size_t i = 0; i < shown.size(); ++i) shown[i] = 0x9e3779b97f4a7c15 * (i + 1);
  const Run runs[] = {{math.lanes, 3 * math.lanes}, {128, 256}};
  for (int64_t used = 0; used <= math.rows; ++used) {
    const at::Tensor s = this->draw({math.rows, columns}), want = s.clone();
    for (int64_t r = 0; r < used; ++r) {
      for (const Run& run : runs) {
        for (int64_t c = run.first; c < run.past; ++c) {
          if ((shown[static_cast<size_t>(r * words + c / 64)] >> (c % 64) & 1) == 0) want[r][c].fill_(-INFINITY);
        }
      }
    }
    math.hide_bits(used, s.template data_ptr<T>(), columns, runs, 2, shown.data(), words);
    EXPECT_TRUE(s.equal(want)) << used;
  }
}

TYPED_TEST(TileMathOf, PutsRows) {
  using T = TypeParam;
  for (const int64_t dim : {1, 7, 16, 33, 64}) {
    const at::Tensor from = this->draw({dim}), before = this->draw({dim + 1}), to = before.clone();
    this->math.put(from.template data_ptr<T>(), dim, T{3}, to.data_ptr(), Put::kAdd);
    const at::Tensor held = this->exact(before).narrow(0, 0, dim), added = 3 * this->exact(from);
    EXPECT_TRUE(within(error_of(to.narrow(0, 0, dim), held + added), this->bound(2, largest(held.abs() + added.abs()))))
        << dim;
    to.narrow(0, 0, dim).fill_(NAN);
    this->math.put(from.template data_ptr<T>(), dim, T{3}, to.data_ptr(), Put::kSet);
    EXPECT_TRUE(to.narrow(0, 0, dim).equal(3 * from)) << dim;
    EXPECT_TRUE(to[dim].equal(before[dim])) << dim;
  }
}

TEST(TileMathOfFloat, RoundsRowsToBf16AsLibTorchDoes) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float odd[] = {0,
                       -0.0f,
                       1 + 0x1p-8f,
                       1 + 0x3p-8f,
                       -1 - 0x1p-8f,
                       1 + 0x1p-8f + 0x1p-23f,
                       0x1.FFFFFEp127f,
                       0x1p-140f,
                       0x3p-134f,
                       kInfinity,
                       -kInfinity,
                       0x1.FDFFFEp-1f,
                       0x1.FFp-1f};
  for (const int64_t dim : {1, 7, 16, 33, 64, 1000}) {
    const at::Tensor from = at::randn({dim}).mul_(at::randn({dim}).mul_(30).exp_());
    for (int64_t i = 0; i < std::min<int64_t>(dim, std::size(odd)); ++i) from[dim - 1 - i] = odd[i];
    const at::Tensor before = at::randn({dim + 1}).to(at::kBFloat16), to = before.clone();
    for (const float factor : {1.f, 0.3f}) {
      tile_math<float>().put(from.data_ptr<float>(), dim, factor, to.data_ptr(), Put::kRound);
      EXPECT_TRUE(to.narrow(0, 0, dim).equal(from.mul(factor).to(at::kBFloat16))) << dim;
      EXPECT_TRUE(to[dim].equal(before[dim])) << dim;
    }
    for (const uint32_t bits : {0x7F800001u, 0x7FFFFFFFu, 0xFFFFFFFFu, 0x7FC00000u}) {
      std::memcpy(from.data_ptr<float>() + dim - 1, &bits, sizeof bits);
      tile_math<float>().put(from.data_ptr<float>(), dim, 1, to.data_ptr(), Put::kRound);
      EXPECT_TRUE(std::isnan(to[dim - 1].item<float>()));
    }
  }
}

// The runs have one or more vectors and do not touch; the elements between them are not changed. Every third case has
// dropout, whose factors the sum does not contain.
TYPED_TEST(TileMathOf, ComputesSoftmaxAndItsGradientOfRuns) {
  using T = TypeParam;
  const TileMath<T>& math = this->math;
  const auto in = this->draw({1}).options();
  for (int64_t n = 1; n <= 9; ++n) {
    const std::vector<Run> runs{{math.lanes, (n + 1) * math.lanes}, {(n + 2) * math.lanes, (n + 3) * math.lanes}};
    const int64_t columns = (n + 4) * math.lanes;
    const at::Tensor seen = at::zeros({columns}, in.dtype(at::kBool));
    for (const Run& run : runs) seen.narrow(0, run.first, run.past - run.first).fill_(true);
    const at::Tensor scores = this->draw({math.rows, columns}) * 3, maximum = this->draw({math.rows});
    const at::Tensor sum = this->draw({math.rows}).abs(), keep = at::zeros({math.rows}, in);
    scores.select(0, 1).fill_(-INFINITY);
    scores.select(0, 2).fill_(-INFINITY);
    maximum[2] = -INFINITY, sum[2] = 0;  // no key so far and none in these runs
    maximum[0] = 50;                     // stays
    const T scale = static_cast<T>(n % 2 == 0 ? 1 : 0.5);
    const at::Tensor factors = this->draw({math.rows, columns}).gt(0).to(in.dtype()) * 1.25;
    const bool drops = n % 3 == 0;
    const T* const of_pairs = drops ? factors.template const_data_ptr<T>() : nullptr;
    const at::Tensor wide_factors = drops ? factors.to(at::kDouble) : at::full({1}, 1.0, at::kDouble);
    const at::Tensor wide = scores.to(at::kDouble).mul(scale).masked_fill(seen.logical_not(), -INFINITY);
    const at::Tensor most = at::maximum(std::get<0>(wide.max(1)), maximum.to(at::kDouble));
    const at::Tensor shift = most.masked_fill(most.eq(-INFINITY), 0);
    const at::Tensor p = (wide - shift.unsqueeze(1)).exp(), kept = (maximum.to(at::kDouble) - shift).exp();
    const at::Tensor total = sum.to(at::kDouble) * kept + p.sum(1);
    const at::Tensor e = scores.clone();
    math.softmax(math.rows, e.template data_ptr<T>(), columns, runs.data(), 2, scale, of_pairs,
                 maximum.template data_ptr<T>(), sum.template data_ptr<T>(), keep.template data_ptr<T>());
    EXPECT_TRUE(maximum.to(at::kDouble).equal(most)) << n;
    // An exponential of x is off by kOfExp roundings, and by |x| more for the rounding of x. |x| exp(x) is at most 1/e.
    EXPECT_TRUE(within(error_of(keep, kept), this->bound(kOfExp + 1, 1))) << n;
    EXPECT_TRUE(within(error_of(sum, total), this->bound(kOfExp + 2 + static_cast<double>(columns), largest(total))))
        << n;
    EXPECT_TRUE(
        e.where(seen.logical_not(), at::zeros_like(e)).equal(scores.where(seen.logical_not(), at::zeros_like(e))));
    const at::Tensor rest = p * wide_factors;
    EXPECT_TRUE(
        within(error_of(e.masked_fill(seen.logical_not(), 0), rest), this->bound(kOfExp + 2, largest(wide_factors))))
        << n;

    const at::Tensor lse = this->draw({math.rows}), delta = this->draw({math.rows});
    const at::Tensor q = scores.clone(), gradients = this->draw({math.rows, columns}), ds = gradients.clone();
    math.gradient(math.rows, q.template data_ptr<T>(), ds.template data_ptr<T>(), columns, runs.data(), 2, scale, T{0},
                  of_pairs, lse.template data_ptr<T>(), delta.template data_ptr<T>());
    const at::Tensor probability = (wide - lse.to(at::kDouble).unsqueeze(1)).exp();
    const at::Tensor of_dropped = gradients.to(at::kDouble) * wide_factors;
    const at::Tensor want = probability * (of_dropped - delta.to(at::kDouble).unsqueeze(1));
    const at::Tensor inside = seen.logical_not();
    const double of_exp = kOfExp + largest(wide - lse.to(at::kDouble).unsqueeze(1));
    const at::Tensor left = probability * wide_factors;
    const at::Tensor magnitude = probability * (of_dropped.abs() + delta.to(at::kDouble).abs().unsqueeze(1));
    EXPECT_TRUE(within(error_of(q.masked_fill(inside, 0), left), this->bound(of_exp + 1, largest(left)))) << n;
    EXPECT_TRUE(within(error_of(ds.masked_fill(inside, 0), want), this->bound(of_exp + 3, largest(magnitude)))) << n;
    EXPECT_TRUE(ds.masked_fill(seen, 0).equal(gradients.masked_fill(seen, 0))) << n;
  }
}

// Scores up to the largest number, each row's of another size. The largest score's exponential is 1, however large it
// is and whatever its product with the scale loses by rounding, and it is 1 again in the gradient step.
TYPED_TEST(TileMathOf, ExponentsAreDifferencesOfRoundedScoresOfAnySize) {
  using T = TypeParam;
  const TileMath<T>& math = this->math;
  const int64_t columns = 4 * math.lanes;
  const Run run{0, columns};
  const at::Tensor zeros = at::zeros({math.rows}, this->draw({1}).options());
  for (const double scale : {1.0, 0.3, 1 / std::sqrt(80.0), 3.0}) {
    for (int exponent = -20; exponent < std::numeric_limits<T>::max_exponent - 4; exponent += 7) {
      const T factor = static_cast<T>(scale);
      const at::Tensor scores = this->draw({math.rows, columns}) * std::ldexp(1.0, exponent);
      scores.select(1, 5).copy_(std::get<0>(scores.max(1)));  // the largest one twice
      const at::Tensor rounded = scores * factor, most = std::get<0>(rounded.max(1));
      const at::Tensor want = (this->exact(rounded) - this->exact(most).unsqueeze(1)).exp();
      const at::Tensor maximum = at::full_like(zeros, -INFINITY), sum = zeros.clone(), keep = zeros.clone();
      const at::Tensor e = scores.clone(), p = scores.clone(), dp = this->draw({math.rows, columns}), ds = dp.clone();
      math.softmax(math.rows, e.template data_ptr<T>(), columns, &run, 1, factor, nullptr,
                   maximum.template data_ptr<T>(), sum.template data_ptr<T>(), keep.template data_ptr<T>());
      EXPECT_TRUE(maximum.equal(most)) << scale << " " << exponent;
      EXPECT_TRUE(std::get<0>(e.max(1)).eq(1).all().template item<bool>()) << scale << " " << exponent;
      EXPECT_TRUE(within(error_of(e, want), this->bound(kOfExp + 1, 1))) << scale << " " << exponent;
      EXPECT_TRUE(within(error_of(sum, want.sum(1)),
                         this->bound(kOfExp + 1 + static_cast<double>(columns), largest(want.sum(1)))))
          << scale << " " << exponent;
      math.gradient(math.rows, p.template data_ptr<T>(), ds.template data_ptr<T>(), columns, &run, 1, factor, T{0},
                    nullptr, most.template data_ptr<T>(), zeros.template data_ptr<T>());
      EXPECT_TRUE(p.equal(e)) << scale << " " << exponent;
      EXPECT_TRUE(ds.equal(e * dp)) << scale << " " << exponent;
    }
  }
}

// Checks the exponentials over the whole range of the dtype: a gradient step with lse 0 returns them, and so does a
// step of the softmax for numbers up to 0, if 0 is one of them.
TYPED_TEST(TileMathOf, ExponentialsAreWithinTwoUlps) {
  using T = TypeParam;
  const bool wide = sizeof(T) == 8;
  const TileMath<T>& math = this->math;
  const at::Tensor zero = at::zeros({math.rows}, this->draw({1}).options());
  const int64_t columns = 1024;
  const Run run{0, columns};
  const auto by_gradient = [&](const at::Tensor& x) {
    const at::Tensor y = at::zeros({math.rows, columns}, x.options()), other = at::zeros_like(y);
    y[0].copy_(x);
    math.gradient(math.rows, y.template data_ptr<T>(), other.template data_ptr<T>(), columns, &run, 1, T{1}, T{0},
                  nullptr, zero.template data_ptr<T>(), zero.template data_ptr<T>());
    return at::Tensor(y[0].clone());
  };
  const auto by_softmax = [&](const at::Tensor& x) {
    const at::Tensor y = at::zeros({math.rows, columns}, x.options());
    const at::Tensor maximum = at::full_like(zero, -1), sum = zero.clone(), keep = zero.clone();
    y[0].copy_(x);
    math.softmax(math.rows, y.template data_ptr<T>(), columns, &run, 1, T{1}, nullptr, maximum.template data_ptr<T>(),
                 sum.template data_ptr<T>(), keep.template data_ptr<T>());
    EXPECT_EQ(maximum[0].template item<double>(), 0);
    return at::Tensor(y[0].clone());
  };
  const double low = wide ? -707.9 : -86.9, high = wide ? 709 : 88;
  double worst = 0;
  const auto compare = [&](const at::Tensor& x, const at::Tensor& y) {
    for (int64_t i = 0; i < columns; ++i) {
      const auto exact = std::exp(static_cast<long double>(x.template data_ptr<T>()[i]));
      worst = std::max(worst, static_cast<double>(std::abs(y.template data_ptr<T>()[i] / exact - 1)));
    }
  };
  for (int part = 0; part < 20; ++part) {
    const at::Tensor x = (at::rand({columns}, zero.options()) * (high - low) + low), negative = x.clamp_max(0);
    compare(x, by_gradient(x));
    negative[0] = 0;
    compare(negative, by_softmax(negative));
  }
  EXPECT_LT(worst, kOfExp * unit_roundoff(this->kType));
  const at::Tensor odd = at::full({columns}, -2, zero.options());
  const int64_t largest = columns - 65;  // in the same lane as the NaN at the end, which must not take its place
  odd[largest] = 0;
  odd[0] = -INFINITY, odd[1] = odd[columns - 1] = NAN, odd[2] = INFINITY, odd[3] = -1000;
  odd[4] = wide ? 710 : 89, odd[5] = 1e30, odd[6] = std::numeric_limits<T>::max();
  const at::Tensor negative = odd.masked_fill(odd > 0, -3);
  const at::Tensor y = by_gradient(odd), of_negative = by_softmax(negative);
  for (const at::Tensor& of : {y, of_negative}) {
    EXPECT_EQ(of[0].template item<double>(), 0);
    EXPECT_TRUE(std::isnan(of[1].template item<double>()));
    EXPECT_EQ(of[3].template item<double>(), 0);
    EXPECT_EQ(of[largest].template item<double>(), 1);
  }
  for (const int64_t huge : {2, 4, 5, 6}) EXPECT_EQ(y[huge].template item<double>(), INFINITY) << huge;
}

}  // namespace
}  // namespace annulus::tile_math_test
