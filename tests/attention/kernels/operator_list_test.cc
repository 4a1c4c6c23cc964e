// Tests which of several attention operators computes a call: the limit on prepared shapes, and shapes that an operator
// refuses. The operators run on a CPU; one of them behaves as LibTorch's cuDNN operator does when cuDNN has no plan.
#include "attention/kernels/operator_list.h"

#include <ATen/ops/randn.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "attention/kernels/composed_kernel.h"
#include "attention/kernels/library_operators.h"
#include "common/error.h"
#include "common/logging/log_setup.h"
#include "tests/attention/kernels/kernel_case.h"
#include "tests/attention/kernels/masked_operator.h"

namespace annulus::operator_list_test {
namespace {

using testing::by_definition;
using testing::Case;
using testing::MaskedOperator;
using Calls = std::map<std::string, int64_t>;

// Prepares a plan for each shape and direction, and refuses some, as LibTorch's cuDNN operator does: it enters the
// shape before it asks for a plan, so that a second call of a refused shape would read a null plan. It counts the calls
// that would crash.
class Refusing : public MaskedOperator {
 public:
  Refusing(bool forwards, bool backwards)
      : MaskedOperator(/*any_band=*/false, "refusing"), forwards_(forwards), backwards_(backwards) {}

  Forward forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Band& band,
                  double scale) const override {
    prepare(q, k, band, /*backward=*/false, forwards_);
    return MaskedOperator::forward(q, k, v, band, scale);
  }
  Backward backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const at::Tensor& out, const at::Tensor& lse, const Band& band, double scale) const override {
    prepare(q, k, band, /*backward=*/true, backwards_);
    return MaskedOperator::backward(dout, q, k, v, out, lse, band, scale);
  }

  int refusals() const { return refusals_; }
  int crashes() const { return crashes_; }

 private:
  void prepare(const at::Tensor& q, const at::Tensor& k, const Band& band, bool backward, bool refuses) const {
    std::vector<int64_t> shape = q.sizes().vec();
    shape.insert(shape.end(), k.sizes().begin(), k.sizes().end());
    shape.insert(shape.end(), {band.hi, backward});
    const std::lock_guard lock(mutex_);
    const bool is_new = entered_.insert(shape).second;
    if (!refuses) return;
    if (!is_new) {
      ++crashes_;
    } else {
      ++refusals_;
      TORCH_CHECK(false, "[cudnn_frontend] Error: No valid execution plans built.");
    }
  }
  const bool forwards_, backwards_;
  mutable std::mutex mutex_;
  mutable std::set<std::vector<int64_t>> entered_;
  mutable int refusals_ = 0, crashes_ = 0;
};

// Keeps the warnings that are logged during a test.
class Operators : public ::testing::Test {
 protected:
  void SetUp() override {
    set_log_console([this](const LogRecord& record, bool) {
      if (record.level == LogLevel::kWarn) warnings_.push_back(record.message);
    });
  }
  void TearDown() override { set_log_console(nullptr); }
  bool warned(size_t number, const std::string& text) const {
    return number < warnings_.size() && warnings_[number].find(text) != std::string::npos;
  }

  std::vector<std::string> warnings_;
};

const Band kWhole, kCausal{-Band::kUnbounded, 0};

void forward(const OperatorList& list, int64_t rows, const Band& band = kWhole, bool gathered = false) {
  const at::Tensor q = at::randn({1, rows, 2, 8}), k = at::randn({1, rows, 1, 8});
  list.forward(q, k, k, band, 0.5, gathered);
}

// Most rectangles of the case are calls of their own. Forward and backward are computed twice.
TEST_F(Operators, RefusedShapesGoToTheNextOperatorAndAreNotAskedForAgain) {
  Case c = testing::scattered(at::kDouble, false);
  const testing::Expected want = by_definition(c);
  for (const auto& [forwards, backwards] : {std::pair{true, true}, {true, false}, {false, true}}) {
    const auto refusing = std::make_shared<Refusing>(forwards, backwards);
    const auto next = std::make_shared<MaskedOperator>(/*any_band=*/true, "next");
    OperatorHistory history;
    ComposedKernelOptions options;
    options.limits.fill = 1;  // few rectangles are gathered
    options.history = &history;
    for (int time = 0; time < 2; ++time) {
      const auto make = [&] { return make_composed_kernel({refusing, next}, options); };
      EXPECT_TRUE(testing::right(testing::run(c, make), c, want)) << forwards << backwards << time;
    }
    EXPECT_EQ(refusing->crashes(), 0) << forwards << backwards;
    EXPECT_GT(refusing->refusals(), 0);
    EXPECT_EQ(history.refusals().size(), static_cast<size_t>(refusing->refusals()));
    EXPECT_GT(history.calls().at("next"), 0);
    EXPECT_EQ(history.calls().count("refusing"), forwards && backwards ? 0u : 1u);
  }
}

TEST_F(Operators, RefusalIsSaidOnceForEachShape) {
  const auto refusing = std::make_shared<Refusing>(/*forwards=*/true, /*backwards=*/true);
  OperatorHistory history;
  const OperatorList list({refusing, std::make_shared<MaskedOperator>(true, "next")}, history);
  for (const int64_t rows : {16, 16, 24, 16}) forward(list, rows);
  EXPECT_EQ(history.calls(), (Calls{{"next", 4}}));
  ASSERT_EQ(warnings_.size(), 2u);
  EXPECT_TRUE(warned(0, "refusing refuses the forward of 1 x 16 queries with 16 keys, full, heads 2:1"))
      << warnings_[0];
  EXPECT_TRUE(warned(0, "No valid execution plans built")) << warnings_[0];
  EXPECT_TRUE(warned(0, "next computes it from now on")) << warnings_[0];
  EXPECT_TRUE(warned(1, "24 queries")) << warnings_[1];
}

// Each thread of LibTorch has plans of its own, so a shape may be refused to several threads at once.
TEST_F(Operators, RefusalsOfSeveralThreadsAreOne) {
  OperatorHistory history;
  const std::vector<std::shared_ptr<Refusing>> refusing{std::make_shared<Refusing>(true, true),
                                                        std::make_shared<Refusing>(true, true)};
  std::vector<std::thread> threads;
  for (const auto& own : refusing) {
    threads.emplace_back([&history, own] {
      const OperatorList list({own, std::make_shared<MaskedOperator>(true, "next")}, history);
      for (int64_t i = 0; i < 20; ++i) forward(list, 16);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(history.calls(), (Calls{{"next", 40}}));
  EXPECT_EQ(history.refusals().size(), 1u);
  for (const auto& own : refusing) EXPECT_EQ(own->crashes(), 0);
}

TEST_F(Operators, ShapeThatAllRefuseIsAnError) {
  OperatorHistory history;
  const OperatorList list({std::make_shared<Refusing>(true, true)}, history);
  for (int time = 0; time < 2; ++time) {
    try {
      forward(list, 16);
      ADD_FAILURE() << time;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUnavailable);
      EXPECT_NE(std::string(error.what()).find("refused by refusing"), std::string::npos) << error.what();
    }
  }
}

// What is no refusal is passed on, and the shape may be tried again.
TEST_F(Operators, ErrorsOfMemoryAndOfTheDeviceAreNoRefusals) {
  class Failing : public MaskedOperator {
   public:
    explicit Failing(bool any_band) : MaskedOperator(any_band, "failing") {}
    Forward forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Band& band,
                    double scale) const override {
      switch (time++) {
        case 0:
          TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory");
          break;
        case 1:
          throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 719, "CUDA error: unspecified launch failure");
        case 2:
          TORCH_CHECK(false, "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED");
          break;
        case 3:
          if (any_band()) TORCH_CHECK(false, "not a refusal, because the operator prepares nothing");
          break;
      }
      return MaskedOperator::forward(q, k, v, band, scale);
    }
    mutable int time = 0;
  };
  for (const bool any_band : {false, true}) {
    OperatorHistory history;
    const OperatorList list({std::make_shared<Failing>(any_band), std::make_shared<MaskedOperator>(true, "next")},
                            history);
    EXPECT_THROW(forward(list, 16), c10::OutOfMemoryError);
    EXPECT_THROW(forward(list, 16), c10::AcceleratorError);
    EXPECT_THROW(forward(list, 16), c10::Error);
    if (any_band) {
      EXPECT_THROW(forward(list, 16), c10::Error);
    }
    forward(list, 16);
    EXPECT_EQ(history.calls(), (Calls{{"failing", 1}})) << any_band;
    EXPECT_TRUE(history.refusals().empty());
  }
}

// A backward of a shape has the place of its forward; gathered calls take none and go to the next operator.
TEST_F(Operators, EndOfThePreparedShapesIsSaidOnce) {
  OperatorHistory history(/*most_prepared=*/3);
  const OperatorList list(
      {std::make_shared<MaskedOperator>(false, "preparing"), std::make_shared<MaskedOperator>(true, "next")}, history);
  forward(list, 16, kWhole, /*gathered=*/true);
  EXPECT_EQ(history.calls(), (Calls{{"next", 1}}));
  forward(list, 16);
  forward(list, 16, kCausal);
  forward(list, 24);
  EXPECT_EQ(history.calls(), (Calls{{"next", 1}, {"preparing", 3}}));
  EXPECT_TRUE(warnings_.empty());
  forward(list, 32);
  forward(list, 40);
  forward(list, 16);
  EXPECT_EQ(history.calls(), (Calls{{"next", 3}, {"preparing", 4}}));
  ASSERT_EQ(warnings_.size(), 1u);
  EXPECT_TRUE(warned(0, "preparing has prepared")) << warnings_[0];
  EXPECT_TRUE(warned(0, "computed by next")) << warnings_[0];
  history.set_most_prepared(4);
  forward(list, 32);
  EXPECT_EQ(history.calls().at("preparing"), 5);
}

TEST_F(Operators, ProcessPreparesSixtyFourShapes) {
  OperatorHistory history;
  const OperatorList list(
      {std::make_shared<MaskedOperator>(false, "preparing"), std::make_shared<MaskedOperator>(true, "next")}, history);
  for (int64_t rows = 2; rows < 72; ++rows) forward(list, rows);
  EXPECT_EQ(history.calls(), (Calls{{"next", 6}, {"preparing", 64}}));
  EXPECT_EQ(warnings_.size(), 1u);
}

// Takes only backwards of causal calls and all forwards.
class HalfTaking : public MaskedOperator {
 public:
  HalfTaking() : MaskedOperator(/*any_band=*/false, "half") {}
  bool takes(const Question& call) const override { return !call.backward || call.causal; }
};

TEST_F(Operators, DirectionAndBandDecideWhoTakesACall) {
  OperatorHistory history;
  const OperatorList list({std::make_shared<HalfTaking>(), std::make_shared<MaskedOperator>(true, "next")}, history);
  for (const Band& band : {kWhole, kCausal}) {
    const at::Tensor q = at::randn({1, 16, 2, 8}, at::kDouble);
    const auto part = list.forward(q, q, q, band, 1.0, /*gathered=*/false);
    list.backward(q, q, q, q, part.out.contiguous(), part.lse, band, 1.0, /*gathered=*/false);
  }
  EXPECT_EQ(history.calls(), (Calls{{"half", 3}, {"next", 1}}));
}

TEST(CudnnOperator, LeavesBackwardsThatWouldGiveNaN) {
  const auto cudnn = cudnn_operator();
  for (const int64_t keys : {2, 63, 64, 65, 128, 192, 704, 4096}) {
    const bool half_a_tile = keys == 64 || keys == 192 || keys == 704;
    for (const bool causal : {false, true}) {
      EXPECT_TRUE(cudnn->takes({.queries = 100, .keys = keys, .causal = causal, .backward = false}));
      EXPECT_EQ(cudnn->takes({.queries = 100, .keys = keys, .causal = causal, .backward = true}),
                causal || !half_a_tile)
          << keys;
    }
  }
  EXPECT_FALSE(cudnn->takes({.queries = 1, .keys = 64}));
  EXPECT_FALSE(cudnn->takes({.queries = 64, .keys = 1}));
}

}  // namespace
}  // namespace annulus::operator_list_test
