// Tests of kernels run on a CPU, by fibers; see place.h.
#include "tests/runtime/model/gpu/place.h"

namespace annulus::testing {
namespace {

class Fibers : public Place {
 public:
  c10::Device device() const override { return c10::Device(c10::kCPU); }
  std::string obstacle() const override { return ""; }
  FiberLauncher* fibers() override { return &on_.launcher; }

 private:
  OnFibers on_;
};

}  // namespace

Place& place() {
  static Fibers fibers;
  return fibers;
}

}  // namespace annulus::testing
