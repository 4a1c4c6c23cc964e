// Tests how much of the model's weights and gradients a rank holds at once at level 3.
#include <ATen/record_function.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>

#include "comm/threads/threads.h"
#include "memory/releasable.h"
#include "runtime/training/training.h"
#include "tests/runtime/training/tiny_run.h"

namespace annulus::gathered_weights_test {
namespace {

// Looks at the leaves of a model before each operation of LibTorch on this thread, and remembers the most elements of
// weights and of gradients that have memory.
class MostHeld {
 public:
  explicit MostHeld(const Parameters& parameters) {
    state() = {&parameters, 0, 0};
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction&) -> std::unique_ptr<at::ObserverContext> {
          State& s = state();
          int64_t weights = 0, gradients = 0;
          for (size_t unit = 0; unit < s.of->units().size(); ++unit) {
            const int64_t elements = s.of->units()[unit].elements;
            weights += has_memory(s.of->values(unit).tensor()) ? elements : 0;
            gradients += has_memory(s.of->gradients(unit).tensor()) ? elements : 0;
          }
          s.weights = std::max(s.weights, weights), s.gradients = std::max(s.gradients, gradients);
          return nullptr;
        }));
  }
  ~MostHeld() { at::removeCallback(handle_); }
  MostHeld(const MostHeld&) = delete;
  MostHeld& operator=(const MostHeld&) = delete;
  int64_t weights() const { return state().weights; }
  int64_t gradients() const { return state().gradients; }

 private:
  struct State {
    const Parameters* of;
    int64_t weights, gradients;
  };
  static State& state() {
    thread_local State state{};
    return state;
  }
  at::CallbackHandle handle_;
};

// A half of a layer is gathered and summed at once, and besides it only its neighbour is there.
TEST(GatheredWeights, AreThoseOfOneLayerAtMost) {
  const TestFolder folder;
  for (const std::string dtype : {"fp32", "bf16"}) {
    for (const bool recompute : {false, true}) {
      Config config = tiny_config(folder);
      config.model.layers = 4;
      config.model.dim = 128;
      config.model.kv_heads = 4;
      config.model.ffn = 256;
      config.model.dtype = dtype;
      config.model.recompute = recompute;
      config.optimizer.shard = 3;
      const Dataset data(config.data, config.run.seed, config.model.vocab);
      run_ranks(2, [&](Communicator& world) {
        Training training(config, world, data, at::kCPU);
        training.step();
        const Parameters& parameters = training.model().parameters();
        int64_t unit = 0, neighbours = 0, layer = 0;
        for (size_t i = 0; i + 1 < parameters.units().size(); ++i) {
          const int64_t both = parameters.units()[i].elements + parameters.units()[i + 1].elements;
          unit = std::max(unit, parameters.units()[i].elements);
          neighbours = std::max(neighbours, both);
          if (i == place_before_attention(1)) layer = both;
        }
        EXPECT_EQ(layer, 4 * 128 * 128 + 3 * 128 * 256 + 2 * 128);
        EXPECT_LE(neighbours, layer + layer / 50) << "in this model layers are larger than their other neighbours";
        const std::string what = dtype + (recompute ? ", recomputed" : "");
        {
          const MostHeld held(parameters);
          training.step();
          EXPECT_EQ(held.weights(), neighbours) << what;
          // Leaves in bf16 leave their gradients to the sums, so only those of the current place are there.
          EXPECT_EQ(held.gradients(), dtype == "bf16" ? unit : neighbours) << what;
        }
        const MostHeld held(parameters);
        training.validate([] { return false; });
        EXPECT_EQ(held.weights(), neighbours) << what << ", validation";
        EXPECT_EQ(held.gradients(), 0) << what << ", validation";
      });
    }
  }
}

}  // namespace
}  // namespace annulus::gathered_weights_test
