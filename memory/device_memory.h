// What LibTorch's allocator holds of a device's memory: counted, and given back. device_memory_cuda.cc in a CUDA build,
// device_memory_cpu.cc in any other. Used by the benchmarks
// and by training, which asks what is free. Thread-safe.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace annulus {

// Bytes. Zeros on a CPU.
struct DeviceMemory {
  int64_t allocated = 0;       // by tensors now
  int64_t peak_allocated = 0;  // since reset_peak_memory
  int64_t peak_reserved = 0;   // of LibTorch's allocator: what it took from the device, free blocks included
  int64_t outside = 0;         // not LibTorch's: the context, libraries, other processes
  int64_t total = 0;
};
DeviceMemory device_memory(c10::Device device);
void reset_peak_memory(c10::Device device);
// Free blocks go back to the device.
void release_cached_memory(c10::Device device);

}  // namespace annulus
