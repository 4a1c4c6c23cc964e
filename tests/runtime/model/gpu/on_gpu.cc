// Tests of kernels run on the first GPU; see place.h. Without a GPU that the build can use they are skipped.
#include <ATen/Context.h>

#include "tests/runtime/model/gpu/place.h"

namespace annulus::testing {
namespace {

class Gpu : public Place {
 public:
  c10::Device device() const override { return c10::Device(c10::kCUDA, 0); }
  std::string obstacle() const override {
    if (gpu::launcher_for(c10::kCUDA) == nullptr) return "this is a build without CUDA (bazel test --config=cuda)";
    if (!at::hasCUDA() || at::detail::getCUDAHooks().deviceCount() == 0) return "this machine has no GPU";
    return "";
  }
  FiberLauncher* fibers() override { return nullptr; }
};

}  // namespace

Place& place() {
  static Gpu gpu;
  return gpu;
}

}  // namespace annulus::testing
