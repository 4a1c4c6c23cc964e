// Tests of the cpu kernel with narrow windows, whose query rows are packed when keys that they see come first and
// written after the last ones, so that rows of a call take each other's places in scratch memory
// (attention/cpu_flash/row_tiles.h).
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <vector>

#include "tests/attention/kernels/kernel_case.h"

namespace annulus {
namespace {

using testing::by_definition;
using testing::Case;
using testing::run;
using testing::worst;

constexpr int64_t kRows = 1400, kKeys = 1500;

// Rows of positions 0, 1, ... and keys, all in one block.
Case rows_and_keys(at::ScalarType type, int64_t heads, int64_t head_dim) {
  Case c;
  const auto options = at::TensorOptions().dtype(type);
  c.q = at::randn({1, kRows, heads, head_dim}, options), c.dout = at::randn({1, kRows, heads, head_dim}, options);
  c.keys = {
      at::randn({1, kKeys, 1, head_dim}, options), at::randn({1, kKeys, 1, head_dim}, options), {0, 1, 1}, {0, 1, 1}};
  c.grad_batch = c.grad_heads = {0, 1, 1}, c.grad_rows = kKeys;
  c.call.group = heads, c.call.scale = 0.3;
  return c;
}

void add(Case& c, Span rows, Span keys, Band band) {
  Tile t;
  t.batch = {0, 1, 1}, t.heads = {0, 1, c.call.group};
  t.query_rows = t.query_positions = rows;
  t.key_rows = t.key_positions = t.grad_rows = keys;
  t.band = band;
  c.tiles.push_back(t);
}

double bound(at::ScalarType type) { return type == at::kDouble ? 2e-14 : type == at::kFloat ? 1e-5 : 0.2; }

class Windows : public ::testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }
  void TearDown() override { at::set_num_threads(1); }
};

// Gradients of keys are added up in place with 32 elements, whole vectors for every instruction set, and elsewhere with
// 10. Chunks begin with different keys for each window.
TEST_F(Windows, OfAnyWidthEqualTheDefinition) {
  for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kBFloat16}) {
    for (const int64_t head_dim : {10, 32}) {
      for (const Band band : {Band{-17, 0}, Band{-130, 11}, Band{40, 340}, Band{-600, -300}}) {
        Case c = rows_and_keys(type, head_dim == 10 ? 1 : 2, head_dim);
        add(c, {0, 1, kRows}, {0, 1, kKeys}, band);
        for (const int threads : {1, 3}) {
          at::set_num_threads(threads);
          EXPECT_LT(worst(run(c, KernelKind::kCpu), by_definition(c)), bound(type))
              << type << " " << head_dim << " " << to_string(band) << ", " << threads << " threads";
        }
      }
    }
  }
}

// Rows and keys with strides: a query may see every third key only, and some rows see none.
TEST_F(Windows, OfStridedRowsEqualTheDefinition) {
  for (const at::ScalarType type : {at::kDouble, at::kFloat}) {
    Case c = rows_and_keys(type, 2, 32);
    add(c, {1, 2, 650}, {0, 3, 480}, {-90, 5});
    add(c, {0, 4, 350}, {1, 4, 370}, {-7, 60});
    add(c, {700, 1, 500}, {2, 9, 160}, {-3, 3});
    EXPECT_LT(worst(run(c, KernelKind::kCpu), by_definition(c)), bound(type)) << type;
  }
}

// The second and third tile's keys begin and end within register tiles of keys, some of whose gradients hold what the
// first tile added and some of which hold nothing.
TEST_F(Windows, AddToSomeRowsOfATileAndSetOthers) {
  for (const at::ScalarType type : {at::kDouble, at::kFloat}) {
    for (const int64_t first : {3, 4, 30, 40}) {
      Case c = rows_and_keys(type, 1, 32);
      add(c, {0, 1, 200}, {0, 1, 120}, {});
      add(c, {200, 1, 300}, {120 - first, 1, 240}, {-200, 40});
      add(c, {500, 1, 300}, {100, 1, 720}, {-60, 0});
      EXPECT_LT(worst(run(c, KernelKind::kCpu), by_definition(c)), bound(type)) << type << " " << first;
    }
  }
}

// Keys between those of two runs of rows, which are computed with them, are seen by no row.
TEST_F(Windows, KeysThatNoRowSeesHaveNoGradients) {
  Case c = rows_and_keys(at::kFloat, 1, 32);
  add(c, {0, 1, 50}, {0, 1, 1200}, {-4, 0});
  add(c, {900, 1, 50}, {0, 1, 1200}, {-4, 0});
  const auto got = run(c, KernelKind::kCpu), want = by_definition(c);
  EXPECT_LT(worst(got, want), bound(at::kFloat));
  EXPECT_TRUE(got.dk.narrow(1, 50, 846).eq(0).all().item<bool>());
}

}  // namespace
}  // namespace annulus
