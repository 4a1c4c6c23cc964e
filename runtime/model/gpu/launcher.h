// Who runs the kernels of this folder for tensors of a device. Called by runtime/model/gpu_ops.cc. Thread-safe.
#pragma once

#include <c10/core/Device.h>

#include "runtime/model/gpu/cross_entropy.h"
#include "runtime/model/gpu/norm.h"
#include "runtime/model/gpu/rotary.h"
#include "runtime/model/gpu/swiglu.h"

namespace annulus::gpu {

// Starts a kernel for arguments whose pointers belong to `device`, on its current stream, and does not wait for it.
// Raises c10::Error if it cannot be started.
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

// The launcher for this type of device, or null if there is none: for CUDA that of a build with --config=cuda, for CPUs
// what set_cpu_launcher was given.
const Launcher* launcher_for(c10::DeviceType type);

// For tests: runs the kernels for tensors on the CPU as well, until it is called with null. The launcher must live as
// long.
void set_cpu_launcher(const Launcher* launcher);

}  // namespace annulus::gpu
