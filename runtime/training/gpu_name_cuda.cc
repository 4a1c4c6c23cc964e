// Implements gpu_name and gpu_bus_id of device_peak.h for a build with CUDA.
#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>

#include <array>

#include "runtime/training/device_peak.h"

namespace annulus {

std::string gpu_name(at::Device device) {
  if (!device.is_cuda()) return {};
  return device.has_index() ? at::cuda::getDeviceProperties(device.index())->name
                            : at::cuda::getCurrentDeviceProperties()->name;
}

std::string gpu_bus_id(at::Device device) {
  if (!device.is_cuda()) return {};
  std::array<char, 32> id{};
  const int index = device.has_index() ? device.index() : c10::cuda::current_device();
  C10_CUDA_CHECK(cudaDeviceGetPCIBusId(id.data(), static_cast<int>(id.size()), index));
  return id.data();
}

}  // namespace annulus
