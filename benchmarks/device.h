// What a benchmark asks the device it measures on: time by the device's own clock, what it is and what drives
// it. device_cuda.cc in a CUDA build, device_cpu.cc in any other. Used by gpu.cc and gpu_training.cc.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

namespace annulus {

// Seconds that a device spends on what is called between start() and stop(): between two events of the current stream
// on a GPU, by the wall clock on a CPU.
class DeviceClock {
 public:
  virtual ~DeviceClock() = default;
  virtual void start() = 0;
  virtual double stop() = 0;  // waits for the device
};
std::unique_ptr<DeviceClock> make_device_clock(at::Device device);

struct DeviceFacts {
  std::string name;      // "NVIDIA H200", "cpu"
  std::string versions;  // "CUDA 13.0, driver for 13.1, cuDNN 9.19.0"; empty on a CPU
  int64_t multiprocessors = 0;
  int64_t highest_mhz = 0;  // of the multiprocessors; 0: unknown. What they run at: nvidia-smi
};
DeviceFacts device_facts(at::Device device);

}  // namespace annulus
