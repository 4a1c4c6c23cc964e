// Counts what LibTorch's allocator holds of a device's memory, and gives unused memory back to the device. A CUDA build
// has device_memory_cuda.cc (it has never run on a GPU), any other device_memory_cpu.cc. Used by the benchmarks, by
// training and by the logits verb. Thread safe.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace annulus {

// All numbers are bytes. They are 0 on a CPU.
struct DeviceMemory {
  int64_t allocated = 0;       // what tensors take now
  int64_t peak_allocated = 0;  // the most that tensors took since reset_peak_memory()
  int64_t peak_reserved = 0;   // the most that the allocator took from the device since then, free blocks included
  int64_t outside = 0;         // what others than the allocator take: the CUDA context, libraries, other processes
  int64_t total = 0;           // the memory of the device
};
DeviceMemory device_memory(c10::Device device);
void reset_peak_memory(c10::Device device);
// Gives the free blocks of the allocator back to the device.
void release_cached_memory(c10::Device device);

}  // namespace annulus
