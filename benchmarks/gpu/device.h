// The device that a benchmark measures on: a clock for the time that its work takes, its name, and the versions of the
// software that drives it. Implemented by device_cuda.cc in a build with CUDA and by device_cpu.cc in any other; no
// hardware has run device_cuda.cc. Used by gpu.cc and gpu_training.cc.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

namespace annulus {

// Measures the seconds that a device spends on the work started between start() and stop(): on a GPU the time between
// two events on the current stream, on a CPU the wall time. Not thread safe.
class DeviceClock {
 public:
  virtual ~DeviceClock() = default;
  virtual void start() = 0;
  virtual double stop() = 0;  // waits for the device and returns the seconds since start()
};
std::unique_ptr<DeviceClock> make_device_clock(at::Device device);

struct DeviceFacts {
  std::string name;      // "NVIDIA H200", "cpu"
  std::string versions;  // "CUDA 13.0, driver for 13.1, cuDNN 9.19.0"; empty on a CPU
  int64_t multiprocessors = 0;
  int64_t highest_mhz = 0;  // highest clock of the multiprocessors; 0: unknown. nvidia-smi shows the actual clock
};
DeviceFacts device_facts(at::Device device);

}  // namespace annulus
