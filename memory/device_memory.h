// Statistics of LibTorch's caching allocator for a device, the release of its unused memory, and which GPU it is. A
// CUDA build has device_memory_cuda.cc, any other device_memory_cpu.cc. Used by the benchmarks, training and inference.
// Thread safe.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <string>

#include "memory/available.h"

namespace annulus {

// All numbers are bytes. They are 0 on a CPU.
struct DeviceMemory {
  int64_t allocated = 0;       // by tensors, now
  int64_t peak_allocated = 0;  // by tensors, the peak since reset_peak_memory()
  int64_t peak_reserved = 0;   // by the allocator, free blocks included, the peak since then
  int64_t outside = 0;         // outside the allocator: the CUDA context, libraries, other processes
  int64_t total = 0;           // the memory of the device
};
DeviceMemory device_memory(c10::Device device);

// Returns what tensors on a device can still take; of a CPU it is what the host has free.
inline std::optional<AvailableMemory> available_memory(c10::Device device) {
  if (!device.is_cuda()) return available_memory();
  const DeviceMemory memory = device_memory(device);
  return AvailableMemory{memory.total - memory.outside - memory.allocated, "the GPU's memory"};
}

void reset_peak_memory(c10::Device device);
// Returns the allocator's free blocks to the device.
void release_cached_memory(c10::Device device);

// The driver's name of a GPU, and its PCI bus id, "00000000:1B:00.0"; empty for a CPU, or in a build without CUDA.
std::string gpu_name(c10::Device device);
std::string gpu_bus_id(c10::Device device);

}  // namespace annulus
