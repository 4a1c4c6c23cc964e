// Tests that a model tells the holder of its weights in time when it uses them and when their gradients are complete
// (runtime/model/weight_use.h): the holder here takes them away whenever it may.
#include "runtime/model/weight_use.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/randint.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <string>
#include <vector>

#include "runtime/model/model.h"
#include "tests/runtime/model/dense_attention.h"
#include "tests/runtime/model/flat_parameters.h"

namespace annulus::weight_use_test {
namespace {

ModelShape shape_of(bool tied) {
  return {.layers = 2,
          .dim = 32,
          .heads = 4,
          .kv_heads = 2,
          .ffn = 48,
          .vocab = 64,
          .tie_embeddings = tied,
          .qkv_bias = true,
          .out_bias = true,
          .mlp_bias = true,
          .qk_norm = true,
          .activation = Activation::kGeluTanh,
          .norm_zero_centered = true,
          .post_norms = true,
          .scale_embeddings = true};
}

// Replaces the weights by NaNs while no place uses them, and copies a place's gradients when they are said to be
// complete.
class Takes final : public WeightUse {
 public:
  explicit Takes(Model& model)
      : parameters_(model.parameters()), tied_(model.shape().tie_embeddings), output_(output_place(2)) {
    for (size_t unit = 0; unit < parameters_.units().size(); ++unit) {
      values_.push_back(parameters_.values(unit).tensor().clone());
      take(unit);
    }
  }

  void before_forward(size_t place) override {
    calls.push_back("before " + std::to_string(place));
    give(place);
  }
  void after_forward(size_t place) override {
    calls.push_back("after " + std::to_string(place));
    // The backward reads these first.
    if (place + 1 < output_ || !c10::GradMode::is_enabled()) take(place);
    if (place == output_) take(place);
  }
  void before_backward(size_t place) override {
    calls.push_back("before " + std::to_string(place));
    if (place > 0 && place < output_) give(place);
  }
  void after_backward(size_t place) override {
    calls.push_back("after " + std::to_string(place));
    if (place < output_) take(place);
    if (place < output_ || !tied_) complete[place] = parameters_.gradients(place).tensor().clone();
  }

  std::vector<std::string> calls;
  std::map<size_t, at::Tensor> complete;  // by place, which is the unit's number

 private:
  size_t unit_of(size_t place) const { return tied_ && place == output_ ? 0 : place; }
  void give(size_t place) { at::Tensor(parameters_.values(unit_of(place)).tensor()).copy_(values_[unit_of(place)]); }
  void take(size_t place) {
    at::Tensor(parameters_.values(unit_of(place)).tensor()).fill_(std::numeric_limits<double>::quiet_NaN());
  }

  Parameters& parameters_;
  const bool tied_;
  const size_t output_;
  std::vector<at::Tensor> values_;
};

at::Tensor loss_of(const Model& model, const at::Tensor& tokens) {
  const at::Tensor x = tokens.slice(1, 0, 12), y = tokens.slice(1, 1).flatten();
  return model.loss(x, y, model.rotary(at::arange(12, at::kLong)), dense_causal(),
                    1.0 / static_cast<double>(y.numel()));
}

TEST(WeightUse, HeldWeightsSufficeAndGradientsAreCompleteInTime) {
  const at::Tensor tokens = at::randint(0, 64, {3, 13}, at::kLong);
  std::vector<std::string> forward, backward;
  for (size_t place = 0; place < 6; ++place) {
    for (const char* when : {"before ", "after "}) forward.push_back(when + std::to_string(place));
  }
  for (size_t place = 6; place-- > 1;) {
    for (const char* when : {"before ", "after "}) backward.push_back(when + std::to_string(place));
  }
  backward.push_back("before 0");
  for (const bool tied : {false, true}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const bool recompute : {false, true}) {
        for (const int64_t tile : {0, 5}) {
          const std::string what = std::string(tied ? "tied, " : "") + toString(dtype) +
                                   (recompute ? ", recomputed" : "") + ", tiles of " + std::to_string(tile) + " rows";
          Model model(shape_of(tied), 3, dtype);
          model.set_recompute(recompute);
          model.set_tile_rows(tile);
          zero_gradients(model.parameters());
          const at::Tensor loss = loss_of(model, tokens);
          loss.backward();
          const at::Tensor want = flat(model.parameters().gradient_views()).clone();
          zero_gradients(model.parameters());

          Takes holder(model);
          model.set_use(&holder);
          const at::Tensor got = loss_of(model, tokens);
          EXPECT_TRUE(got.equal(loss)) << what;
          EXPECT_EQ(holder.calls, forward) << what;
          holder.calls.clear();
          got.backward();
          EXPECT_EQ(holder.calls, backward) << what;
          EXPECT_TRUE(flat(model.parameters().gradient_views()).equal(want)) << what;
          EXPECT_EQ(holder.complete.size(), tied ? 4U : 5U) << what;
          for (const auto& [place, gradients] : holder.complete) {
            EXPECT_TRUE(gradients.equal(model.parameters().gradients(place).tensor())) << what << ", place " << place;
          }

          holder.calls.clear();
          const c10::AutoGradMode no_grad(false);
          EXPECT_TRUE(loss_of(model, tokens).equal(loss)) << what;
          EXPECT_EQ(holder.calls, forward) << what << ", without gradients";
        }
      }
    }
  }
}

}  // namespace
}  // namespace annulus::weight_use_test
