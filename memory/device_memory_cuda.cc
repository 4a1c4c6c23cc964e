// See device_memory.h.
#include "memory/device_memory.h"

#include <ATen/Context.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <array>

namespace annulus {
namespace {

// Initializes the device in LibTorch; before that the allocator has no numbers.
void begin(c10::Device device) {
  if (device.is_cuda()) at::globalContext().lazyInitDevice(device.type());
}

constexpr size_t kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

}  // namespace

DeviceMemory device_memory(c10::Device device) {
  begin(device);
  DeviceMemory memory;
  if (!device.is_cuda()) return memory;
  const c10::cuda::CUDAGuard guard(device);
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(device.index());
  memory.allocated = stats.allocated_bytes[kAll].current;
  memory.peak_allocated = stats.allocated_bytes[kAll].peak;
  memory.peak_reserved = stats.reserved_bytes[kAll].peak;
  size_t free = 0, total = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  memory.total = static_cast<int64_t>(total);
  memory.outside = static_cast<int64_t>(total - free) - stats.reserved_bytes[kAll].current;
  return memory;
}

void reset_peak_memory(c10::Device device) {
  begin(device);
  if (device.is_cuda()) c10::cuda::CUDACachingAllocator::resetPeakStats(device.index());
}

void release_cached_memory(c10::Device device) {
  begin(device);
  if (device.is_cuda()) c10::cuda::CUDACachingAllocator::emptyCache();
}

std::string gpu_name(c10::Device device) {
  if (!device.is_cuda()) return {};
  return device.has_index() ? at::cuda::getDeviceProperties(device.index())->name
                            : at::cuda::getCurrentDeviceProperties()->name;
}

std::string gpu_bus_id(c10::Device device) {
  if (!device.is_cuda()) return {};
  std::array<char, 32> id{};
  const int index = device.has_index() ? device.index() : c10::cuda::current_device();
  C10_CUDA_CHECK(cudaDeviceGetPCIBusId(id.data(), static_cast<int>(id.size()), index));
  return id.data();
}

}  // namespace annulus
