// Where the tests of gpu_ops_test.cc run: on a GPU (on_gpu.cc), or on a CPU by fibers (on_fibers.cc). A test is linked
// with one of them.
#pragma once

#include <c10/core/Device.h>

#include <string>
#include <vector>

#include "tests/runtime/model/gpu/fiber_launcher.h"

namespace annulus::testing {

class Place {
 public:
  virtual ~Place() = default;
  virtual c10::Device device() const = 0;
  virtual std::string obstacle() const = 0;  // why tests cannot run here; empty if they can
  // On fibers: the launcher that runs the kernels; otherwise null.
  virtual FiberLauncher* fibers() = 0;
};

Place& place();

}  // namespace annulus::testing
