// Kernels on hand-made tiles: gathered, strided, banded, of blocks that hold some batch rows and heads only; dropout;
// merging partial results; grouping tiles and heads; the choice of a kernel.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <tuple>

#include "attention/kernels/attention_operator.h"
#include "attention/kernels/dense.h"
#include "attention/kernels/detect.h"
#include "attention/kernels/dropout.h"
#include "attention/kernels/kernel.h"
#include "attention/kernels/merge.h"
#include "attention/kernels/operator_kernel.h"
#include "attention/kernels/row_math.h"
#include "attention/kernels/tile_groups.h"
#include "attention/kernels/tile_views.h"
#include "common/error.h"
#include "tests/attention/kernel_case.h"

namespace annulus {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Part {
  at::Tensor out, lse;
};

Part softmax_part(const at::Tensor& scores, const at::Tensor& values) {
  const at::Tensor lse = scores.logsumexp({-1});
  return {(scores - lse.unsqueeze(-1)).exp().matmul(values), lse};
}

TEST(Merge, AnyOrderOfPartsGivesTheWhole) {
  const auto options = at::TensorOptions().dtype(at::kDouble);
  const at::Tensor scores = at::randn({2, 3, 5, 12}, options) * 30, values = at::randn({2, 3, 12, 4}, options);
  const Part whole = softmax_part(scores, values);
  for (const std::vector<int>& order : {std::vector<int>{0, 1, 2}, {2, 0, 1}, {1, 2, 0}}) {
    at::Tensor out = at::full({2, 3, 5, 4}, 7.0, options), lse = at::full({2, 3, 5}, -kInfinity, options);
    for (const int part : order) {
      const Part p = softmax_part(scores.slice(3, part * 4, part * 4 + 4), values.slice(2, part * 4, part * 4 + 4));
      merge_partial(out, lse, p.out, p.lse);
    }
    EXPECT_LT((out - whole.out).abs().max().item<double>(), 1e-12);
    EXPECT_LT((lse - whole.lse).abs().max().item<double>(), 1e-12);
  }
}

TEST(Merge, EmptyPartsChangeNothingAndHugeDifferencesDoNotOverflow) {
  const auto options = at::TensorOptions().dtype(at::kFloat);
  at::Tensor out = at::full({1, 1, 2, 3}, 2.0, options), lse = at::zeros({1, 1, 2}, options);
  const at::Tensor nothing = at::full({1, 1, 2, 3}, NAN, options);
  merge_partial(out, lse, nothing, at::full({1, 1, 2}, -kInfinity, options));
  EXPECT_TRUE((out == 2.0).all().item<bool>());
  EXPECT_TRUE((lse == 0).all().item<bool>());
  merge_partial(out, lse, at::full({1, 1, 2, 3}, 5.0, options), at::full({1, 1, 2}, 1e4, options));
  EXPECT_TRUE((out == 5.0).all().item<bool>());
  EXPECT_TRUE((lse == 1e4).all().item<bool>());
  merge_partial(out, lse, at::full({1, 1, 2, 3}, 1.0, options), at::full({1, 1, 2}, -1e4, options));
  EXPECT_TRUE((out == 5.0).all().item<bool>());
}

// Parts of some of the rows, several in one pass, after others or not, into a narrower dtype, and plain sums.
TEST(Merge, SeveralPartsAtOnceGiveTheWhole) {
  const auto options = at::TensorOptions().dtype(at::kDouble);
  const int64_t n = 9;
  const at::Tensor scores = at::randn({2, 3, n, 20}, options) * 20, values = at::randn({2, 3, 20, 5}, options);
  at::Tensor shown = scores.clone();
  // Keys 4 p, ..., 4 p + 3 are part p's, which has rows first[p], ..., first[p] + count[p] - 1 alone.
  const std::vector<int64_t> first{0, 3, 0, 5, 2}, count{9, 4, 2, 4, 0};
  std::vector<MergePart> parts;
  for (size_t p = 0; p < 5; ++p) {
    const auto keys = [&](const at::Tensor& t) { return t.narrow(3, static_cast<int64_t>(p) * 4, 4); };
    keys(shown).narrow(2, 0, first[p]).fill_(-kInfinity);
    keys(shown).narrow(2, first[p] + count[p], n - first[p] - count[p]).fill_(-kInfinity);
    const Part part =
        softmax_part(keys(scores).narrow(2, first[p], count[p]), values.narrow(2, static_cast<int64_t>(p) * 4, 4));
    parts.push_back({part.out, part.lse, first[p]});
  }
  const Part whole = softmax_part(shown, values);
  const auto all = std::span<const MergePart>(parts);
  at::Tensor out = at::full({2, 3, n, 5}, NAN, options), lse = at::full({2, 3, n}, NAN, options);
  merge_parts(out, lse, {}, {}, all.first(3));
  merge_parts(out, lse, out, lse, all.subspan(3));
  EXPECT_LT((out - whole.out).abs().max().item<double>(), 1e-12);
  EXPECT_LT((lse - whole.lse).abs().max().item<double>(), 1e-12);
  // Without the part that has every row, some see nothing.
  merge_parts(out, lse, {}, {}, all.subspan(3, 1));
  EXPECT_TRUE(out.narrow(2, 0, 5).eq(0).all().item<bool>());
  EXPECT_TRUE(lse.narrow(2, 0, 5).eq(-kInfinity).all().item<bool>());
  EXPECT_TRUE(out.narrow(2, 5, 4).equal(parts[3].out));

  std::vector<MergePart> narrow;
  for (const MergePart& part : parts)
    narrow.push_back({part.out.to(at::kBFloat16), part.lse.to(at::kFloat), part.first});
  const at::Tensor wide = at::empty({2, 3, n, 5}), l = at::empty({2, 3, n});
  const at::Tensor final_out = at::empty({2, 3, n, 5}, at::TensorOptions().dtype(at::kBFloat16));
  merge_parts(wide, l, {}, {}, std::span(narrow).first(2));
  merge_parts(final_out, l, wide, l, std::span(narrow).subspan(2));
  EXPECT_LT((final_out.to(at::kDouble) - whole.out).abs().max().item<double>(), 0.05);

  at::Tensor sum = at::full({2, 3, n, 5}, NAN, options), want = at::zeros({2, 3, n, 5}, options);
  for (MergePart& part : parts) {
    part.lse = at::Tensor();
    want.narrow(2, part.first, part.out.size(2)).add_(part.out);
  }
  merge_parts(sum, {}, {}, {}, all.first(2));
  merge_parts(sum, {}, sum, {}, all.subspan(2));
  EXPECT_LT((sum - want).abs().max().item<double>(), 1e-13);
}

TEST(HeadGroups, KeepHeadsOfOneKvHeadTogether) {
  const auto whole = head_groups({0, 1, 8}, 4);
  ASSERT_EQ(whole.size(), 1u);
  EXPECT_EQ(whole[0].kv, (Span{0, 1, 2}));
  const auto ragged = head_groups({2, 1, 4}, 4);  // heads 2, 3 read kv 0; 4, 5 read kv 1
  ASSERT_EQ(ragged.size(), 2u);
  EXPECT_EQ(ragged[0].query, (Span{2, 1, 2}));
  EXPECT_EQ(ragged[1].kv, (Span{1, 1, 1}));
  const auto strided = head_groups({1, 3, 3}, 4);  // 1 | 4, 7
  ASSERT_EQ(strided.size(), 2u);
  EXPECT_EQ(strided[1].query, (Span{4, 3, 2}));
}

TEST(TileGroups, TilesOfTheSameQueriesAreOneGroupAndLongOnesAreCut) {
  Tile tile;
  tile.batch = tile.heads = {0, 1, 1};
  tile.query_rows = tile.query_positions = {0, 1, 128};
  tile.key_rows = tile.key_positions = tile.grad_rows = {0, 1, 100};
  Tile other = tile, far = tile;
  other.query_rows = other.query_positions = {64, 1, 128};
  far.key_rows = far.key_positions = far.grad_rows = {300, 2, 50};
  const std::vector<Tile> tiles{tile, other, far};
  const auto groups = group_tiles(tiles, 1000);
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_EQ(groups[0].tiles.size(), 2u);
  EXPECT_EQ(groups[0].keys, 150);
  EXPECT_TRUE(share_queries(groups[0], groups[1]));
  const auto cut = group_tiles(std::vector<Tile>{far}, 40);
  ASSERT_EQ(cut.size(), 2u);
  EXPECT_EQ(cut[1].tiles[0].key_rows, (Span{380, 2, 10}));
  EXPECT_EQ(cut[1].tiles[0].grad_rows, (Span{380, 2, 10}));
}

TEST(RowMath, ExponentialsAreExactToTwoUnits) {
  for (float x = -86.9f; x < 88; x += 0.0137f) {
    float y = x;
    row_exp(&y, 1, 0);
    ASSERT_LT(std::abs(y / std::exp(static_cast<double>(x)) - 1), 2.4e-7) << x;
  }
  float odd[] = {-INFINITY, NAN, INFINITY, -200};
  row_exp(odd, 4, 0);
  EXPECT_EQ(odd[0], 0);
  EXPECT_TRUE(std::isnan(odd[1]));
  EXPECT_EQ(odd[2], INFINITY);
  EXPECT_EQ(odd[3], 0);
}

using testing::by_definition;
using testing::Case;
using testing::Result;
using testing::run;
using testing::scattered;
using testing::worst;

// One thread unless a test says otherwise: how many there are is the machine's affair.
class Kernels : public ::testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }
};

TEST_F(Kernels, ScatteredTilesOfPartsOfBatchRowsAndHeads) {
  for (const bool one_head : {false, true}) {
    for (const double rate : {0.0, 0.3}) {
      for (const at::ScalarType type : {at::kDouble, at::kFloat}) {
        Case c = scattered(type, one_head);
        c.call.dropout = {rate, 7, 3, 1, 5};
        const Result want = by_definition(c);
        EXPECT_LT(worst(run(c, KernelKind::kReference), want), type == at::kDouble ? 1e-11 : 1e-4);
        EXPECT_LT(worst(run(c, KernelKind::kAten), want), type == at::kDouble ? 1e-11 : 1e-4);
        EXPECT_LT(worst(run(c, KernelKind::kEfficient), want), type == at::kDouble ? 1e-11 : 1e-4);
      }
    }
  }
}

// As FlashAttention's operators take bands, which are not on a CPU: by masks. It checks what it is promised.
class MaskedOperator : public AttentionOperator {
 public:
  explicit MaskedOperator(bool any_band) : any_band_(any_band) {}
  bool any_band() const override { return any_band_; }
  bool prepares_shapes() const override { return !any_band_; }

  Forward forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Band& band,
                  double scale) const override {
    expect_shapes(q, k, v, band);
    const auto part = dense_forward(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                                    mask(band, q.size(1), k.size(1)), {}, scale);
    return {part.out.transpose(1, 2), part.lse};
  }

  Backward backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const at::Tensor& out, const at::Tensor& lse, const Band& band, double scale) const override {
    expect_shapes(q, k, v, band);
    EXPECT_EQ(dout.sizes(), q.sizes());
    EXPECT_EQ(out.strides(), q.strides());  // plans that are kept by shape may rest on it
    EXPECT_EQ(dout.strides(), q.strides());
    EXPECT_EQ(lse.sizes(), (std::vector<int64_t>{q.size(0), q.size(2), q.size(1)}));
    EXPECT_TRUE(lse.is_contiguous());
    EXPECT_FALSE(lse.eq(-kInfinity).any().item<bool>());
    const auto part = dense_backward(dout.transpose(1, 2), q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                                     out.transpose(1, 2), lse, mask(band, q.size(1), k.size(1)), {}, scale);
    return {part.dq.transpose(1, 2), part.dk.transpose(1, 2), part.dv.transpose(1, 2)};
  }

 private:
  static at::Tensor mask(const Band& band, int64_t n, int64_t m) {
    const at::Tensor apart = at::arange(m).unsqueeze(0) - at::arange(n).unsqueeze(1);
    return apart.ge(band.lo).logical_and(apart.le(band.hi));
  }
  void expect_shapes(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Band& band) const {
    EXPECT_EQ(q.size(3) % 8, 0);
    EXPECT_EQ(k.sizes(), v.sizes());
    EXPECT_EQ(q.size(2) % k.size(2), 0);
    EXPECT_EQ(q.stride(3), 1);
    EXPECT_EQ(k.stride(3), 1);
    const bool whole = band.unbounded_below() && band.unbounded_above();
    const bool causal = band.unbounded_below() && band.hi == 0 && q.size(1) == k.size(1);
    EXPECT_TRUE(whole || causal || (any_band_ && q.size(1) <= k.size(1)));
    EXPECT_TRUE(mask(band, q.size(1), k.size(1)).any(0).all().item<bool>());
    EXPECT_TRUE(mask(band, q.size(1), k.size(1)).any(1).all().item<bool>());
  }
  const bool any_band_;
};

TEST_F(Kernels, OperatorsAreComposedWhateverTheyTake) {
  const auto masked = [](bool any_band) { return std::make_shared<MaskedOperator>(any_band); };
  const std::vector<std::vector<std::shared_ptr<const AttentionOperator>>> lists = {
      {masked(true)}, {masked(false)}, {masked(false), masked(true)}};
  for (const bool one_head : {false, true}) {
    const Case c = scattered(at::kDouble, one_head);
    const Result want = by_definition(c);
    for (const auto& operators : lists) {
      for (const auto& [gathered, fill] : {std::pair<int64_t, int64_t>{1 << 20, 1 << 20}, {1, 1}, {300, 4}}) {
        OperatorKernelOptions options;
        options.limits.most_gathered = gathered, options.limits.fill = fill;
        EXPECT_LT(worst(run(c, [&] { return make_operator_kernel(operators, options); }), want), 1e-11)
            << one_head << " " << operators.size() << " " << gathered;
      }
    }
  }
}

TEST_F(Kernels, OneCallThatIsAllIsNotCopied) {
  Case c;
  c.q = at::randn({2, 64, 4, 16}), c.dout = at::randn({2, 64, 4, 16});
  c.keys = {at::randn({2, 64, 2, 16}), at::randn({2, 64, 2, 16}), {0, 1, 2}, {0, 1, 2}};
  c.call.group = 2;
  Tile t;
  t.batch = {0, 1, 2}, t.heads = {0, 1, 4};
  t.query_rows = t.query_positions = t.key_rows = t.key_positions = {0, 1, 64};
  t.band.hi = 0;
  // Hands out what it is told to.
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
  OperatorKernelOptions options;
  options.limits.fill = 1;
  const auto kernel = make_operator_kernel({recorded}, options);
  at::Tensor out, lse;
  kernel->begin_forward(c.q, c.call);
  kernel->forward(c.keys, std::vector<Tile>{t}, {});
  kernel->finish_forward(out, lse);
  EXPECT_EQ(out.data_ptr(), recorded->result.out.data_ptr());
  EXPECT_EQ(lse.data_ptr(), recorded->result.lse.data_ptr());
}

TEST_F(Kernels, ThreadsAndFewKvHeadsGiveTheSame) {
  const Case c = scattered(at::kDouble, true);
  const Result want = by_definition(c);
  for (const int threads : {1, 2, 5}) {
    at::set_num_threads(threads);
    EXPECT_LT(worst(run(c, KernelKind::kAten), want), 1e-11) << threads;
  }
  at::set_num_threads(1);
}

TEST_F(Kernels, ATileOutsideItsBlockIsRefused) {
  Case c = scattered(at::kFloat, true);
  c.tiles[0].heads = {0, 1, 2};  // kv head 0: not held
  EXPECT_THROW(run(c, KernelKind::kAten), Error);
  EXPECT_THROW(run(c, KernelKind::kReference), Error);
}

// The most memory that this process ever held.
int64_t peak_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss * 1024;
}

TEST_F(Kernels, NothingIsOfTheSizeOfAllPairs) {
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
    run(c, KernelKind::kAten);
    EXPECT_LT(peak_bytes() - before, 2 * n * n) << rate;  // all pairs' scores are 4 n^2 bytes
  }
}

TEST(Dropout, FactorsAreTheSameHoweverTheyAreCut) {
  const Dropout dropout{0.4, 11, 2, 3, 6};
  const at::Tensor like = at::zeros({1}, at::TensorOptions().dtype(at::kDouble));
  const Span batch{0, 1, 3}, heads{0, 1, 4}, queries{5, 1, 40}, keys{3, 1, 50};
  const at::Tensor whole = dropout_factors(dropout, batch, heads, queries, keys, like);
  const at::Tensor part = dropout_factors(dropout, {1, 1, 2}, {1, 2, 2}, {7, 3, 9}, {6, 5, 8}, like);
  EXPECT_TRUE(part.equal(whole.slice(0, 1, 3).slice(1, 1, 4, 2).slice(2, 2, 27, 3).slice(3, 3, 39, 5)));
  Dropout shifted = dropout;  // the same global batch rows
  shifted.first_row = 7;
  EXPECT_TRUE(dropout_factors(shifted, {0, 1, 2}, heads, queries, keys, like).equal(whole.slice(0, 1, 3)));
  for (Dropout other : {Dropout{0.4, 12, 2, 3, 6}, Dropout{0.4, 11, 3, 3, 6}, Dropout{0.4, 11, 2, 4, 6}}) {
    EXPECT_FALSE(dropout_factors(other, batch, heads, queries, keys, like).equal(whole));
  }
}

TEST(Dropout, KeepsTheShareAskedFor) {
  const at::Tensor factors =
      dropout_factors({0.25, 1, 0, 0, 0}, {0, 1, 2}, {0, 1, 4}, {0, 1, 250}, {0, 1, 500}, at::zeros({1}));
  const int64_t kept = factors.ne(0).sum().item<int64_t>();
  EXPECT_NEAR(static_cast<double>(kept) / 1e6, 0.75, 0.002);  // 4.6 standard deviations
  EXPECT_FLOAT_EQ(factors.max().item<float>(), 1 / 0.75f);
}

TEST(ChooseKernel, SaysWhy) {
  const KernelChoice fp32 = choose_kernel(KernelKind::kAuto, at::kCPU, at::kFloat, 64, false);
  EXPECT_EQ(fp32.kind, KernelKind::kAten);
  EXPECT_NE(fp32.reason.find("CPU"), std::string::npos);
  EXPECT_NE(choose_kernel(KernelKind::kAuto, at::kCPU, at::kHalf, 64, true).reason.find("falls back"),
            std::string::npos);
  EXPECT_EQ(choose_kernel(KernelKind::kReference, at::kCUDA, at::kFloat, 64, false).kind, KernelKind::kReference);
  EXPECT_THROW(choose_kernel(KernelKind::kAuto, at::kCPU, at::kLong, 64, false), Error);
  EXPECT_THROW(choose_kernel(KernelKind::kCudnn, at::kCPU, at::kFloat, 64, false), Error);
  EXPECT_EQ(choose_kernel(KernelKind::kEfficient, at::kCPU, at::kFloat, 64, false).kind, KernelKind::kEfficient);
  EXPECT_EQ(detected_kernels().size(), 5u);
}

TEST(ChooseKernel, OnGpusByWhatTheyAre) {
  GpuAbilities h200{"NVIDIA H200", 90, 91900, true, "not loaded"};
  const auto chosen = [](const GpuAbilities& gpu, at::ScalarType type, int64_t head_dim,
                         KernelKind asked = KernelKind::kAuto) {
    return choose_gpu_kernel(asked, gpu, type, head_dim, false).kind;
  };
  EXPECT_EQ(chosen(h200, at::kBFloat16, 128), KernelKind::kCudnn);
  EXPECT_EQ(chosen(h200, at::kHalf, 256), KernelKind::kFlash2);
  EXPECT_EQ(chosen(h200, at::kBFloat16, 260), KernelKind::kEfficient);
  EXPECT_EQ(chosen(h200, at::kFloat, 64), KernelKind::kEfficient);
  EXPECT_EQ(chosen(h200, at::kDouble, 64), KernelKind::kReference);
  EXPECT_EQ(chosen(h200, at::kBFloat16, 128, KernelKind::kFlash2), KernelKind::kFlash2);
  h200.flash3_obstacle = "";
  EXPECT_EQ(chosen(h200, at::kBFloat16, 128), KernelKind::kFlash3);
  const GpuAbilities a100{"NVIDIA A100-SXM4-80GB", 80, 91900, true, ""};
  EXPECT_EQ(chosen(a100, at::kBFloat16, 128), KernelKind::kCudnn);
  EXPECT_EQ(chosen(a100, at::kBFloat16, 129), KernelKind::kFlash2);
  const GpuAbilities old_cudnn{"NVIDIA H100", 90, 91002, true, "not loaded"};
  EXPECT_EQ(chosen(old_cudnn, at::kBFloat16, 128), KernelKind::kFlash2);
  const GpuAbilities t4{"Tesla T4", 75, 91900, true, ""};
  EXPECT_EQ(chosen(t4, at::kHalf, 64), KernelKind::kEfficient);
  EXPECT_EQ(chosen(t4, at::kBFloat16, 64), KernelKind::kReference);
  for (const auto& [kind, type, why] : {std::tuple{KernelKind::kAten, at::kFloat, "CPUs"},
                                        {KernelKind::kCudnn, at::kFloat, "bf16 and fp16"},
                                        {KernelKind::kFlash3, at::kHalf, "capability 8.0"}}) {
    try {
      chosen(t4, type, 64, kind);
      ADD_FAILURE() << why;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUnavailable);
      EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("auto"), std::string::npos) << error.what();
    }
  }
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  EXPECT_EQ(chosen(h200, at::kBFloat16, 256), KernelKind::kFlash2);
  EXPECT_EQ(chosen(a100, at::kBFloat16, 128), KernelKind::kFlash2);
  at::globalContext().setDeterministicAlgorithms(false, /*warn_only=*/false);
  const std::string reason = choose_gpu_kernel(KernelKind::kAuto, old_cudnn, at::kBFloat16, 128, false).reason;
  EXPECT_NE(reason.find("9.15.1"), std::string::npos) << reason;  // why the faster one is not taken
}

}  // namespace
}  // namespace annulus
