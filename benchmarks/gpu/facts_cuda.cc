// Implements device_facts of gpu_parts.h for a build with CUDA.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/cuda/CUDAException.h>
#include <cuda_runtime_api.h>

#include "benchmarks/gpu/gpu_parts.h"

namespace annulus {

DeviceFacts device_facts(at::Device device) {
  if (!device.is_cuda()) return {"cpu"};
  cudaDeviceProp properties{};
  C10_CUDA_CHECK(cudaGetDeviceProperties(&properties, device.index()));
  int khz = 0, runtime = 0, driver = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, device.index()));
  C10_CUDA_CHECK(cudaRuntimeGetVersion(&runtime));
  C10_CUDA_CHECK(cudaDriverGetVersion(&driver));
  // 13010 is "13.1", 91900 is "9.19.0".
  std::string versions = line("CUDA %lld.%lld, driver for %lld.%lld", runtime / 1000, runtime % 1000 / 10,
                              driver / 1000, driver % 1000 / 10);
  const auto& hooks = at::detail::getCUDAHooks();
  if (hooks.hasCuDNN()) {
    const auto v = hooks.versionRuntimeCuDNN();
    versions += line(", cuDNN %lld.%lld.%lld", v / 10000, v % 10000 / 100, v % 100);
  }
  return {properties.name, versions, properties.multiProcessorCount, khz / 1000};
}

}  // namespace annulus
