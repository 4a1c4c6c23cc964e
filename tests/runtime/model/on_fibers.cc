// Linked with fused_ops_test.cc: its tests then compute fp32, bf16 and fp16 with the kernels for GPUs, which run on the
// CPU (tests/runtime/model/gpu/fiber_launcher.h).
#include <gtest/gtest.h>

#include <memory>

#include "tests/runtime/model/gpu/fiber_launcher.h"

namespace annulus::testing {
namespace {

class Kernels : public ::testing::Environment {
 public:
  void SetUp() override { on_ = std::make_unique<OnFibers>(); }
  void TearDown() override {
    EXPECT_FALSE(on_->launcher.started.empty()) << "no test ran a kernel";
    on_.reset();
  }

 private:
  std::unique_ptr<OnFibers> on_;
};

const ::testing::Environment* const kAdded = ::testing::AddGlobalTestEnvironment(new Kernels);

}  // namespace
}  // namespace annulus::testing
