// Implements gpu_name of device_peak.h for a build with CUDA.
#include <ATen/cuda/CUDAContextLight.h>

#include "runtime/training/device_peak.h"

namespace annulus {

std::string gpu_name(at::Device device) {
  if (!device.is_cuda()) return {};
  return device.has_index() ? at::cuda::getDeviceProperties(device.index())->name
                            : at::cuda::getCurrentDeviceProperties()->name;
}

}  // namespace annulus
