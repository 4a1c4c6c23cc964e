// Dispatches the kernels of this folder by device type. Used by runtime/model/gpu_ops.cc. Thread safe.
#pragma once

#include <c10/core/Device.h>

#include "runtime/model/gpu/cross_entropy.h"
#include "runtime/model/gpu/norm.h"
#include "runtime/model/gpu/rotary.h"
#include "runtime/model/gpu/swiglu.h"

namespace annulus::gpu {

// Launches a kernel for arguments whose pointers belong to `device`, asynchronously on its current stream. Raises
// c10::Error if the launch fails.
class Launcher {
 public:
  virtual ~Launcher() = default;
  virtual void start(const NormArguments& arguments, c10::Device device) const = 0;
  virtual void start(const NormGradientArguments& arguments, c10::Device device) const = 0;
  virtual void start(const ColumnArguments& arguments, c10::Device device) const = 0;
  virtual void start(const RotaryArguments& arguments, c10::Device device) const = 0;
  virtual void start(const SwiGluArguments& arguments, c10::Device device) const = 0;
  virtual void start(const CrossEntropyArguments& arguments, c10::Device device) const = 0;
};

// Returns the launcher for this type of device, or null: for CUDA that of a build with --config=cuda, for CPUs that of
// set_cpu_launcher().
const Launcher* launcher_for(c10::DeviceType type);

// For tests: runs the kernels for CPU tensors as well, by this launcher, which must stay alive until a call with null.
void set_cpu_launcher(const Launcher* launcher);

}  // namespace annulus::gpu
