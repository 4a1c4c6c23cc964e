// Implements device.h for a build with CUDA: GPUs, and the CPU as in device_cpu.cc. It has never run on a GPU.
#include "benchmarks/gpu/device.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "benchmarks/gpu/wall_device.h"

namespace annulus {
namespace {

class EventClock final : public DeviceClock {
 public:
  explicit EventClock(at::Device device) : device_(device) {
    const c10::cuda::CUDAGuard guard(device_);
    C10_CUDA_CHECK(cudaEventCreate(&begin_));
    C10_CUDA_CHECK(cudaEventCreate(&end_));
  }
  ~EventClock() override {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  EventClock(const EventClock&) = delete;
  EventClock& operator=(const EventClock&) = delete;

  void start() override { record(begin_); }
  double stop() override {
    record(end_);
    C10_CUDA_CHECK(cudaEventSynchronize(end_));
    float milliseconds = 0;
    C10_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, begin_, end_));
    return 1e-3 * static_cast<double>(milliseconds);
  }

 private:
  void record(cudaEvent_t event) {
    const c10::cuda::CUDAGuard guard(device_);
    C10_CUDA_CHECK(cudaEventRecord(event, c10::cuda::getCurrentCUDAStream(device_.index())));
  }

  const at::Device device_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

// 13010 -> "13.1", 91900 -> "9.19.0"
std::string cuda_version(int64_t v) { return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10); }
std::string cudnn_version(int64_t v) {
  return std::to_string(v / 10000) + "." + std::to_string(v % 10000 / 100) + "." + std::to_string(v % 100);
}

}  // namespace

std::unique_ptr<DeviceClock> make_device_clock(at::Device device) {
  if (device.is_cuda()) return std::make_unique<EventClock>(device);
  return std::make_unique<WallClock>();
}

DeviceFacts device_facts(at::Device device) {
  if (!device.is_cuda()) return kCpuFacts;
  cudaDeviceProp properties{};
  C10_CUDA_CHECK(cudaGetDeviceProperties(&properties, device.index()));
  int khz = 0, runtime = 0, driver = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, device.index()));
  C10_CUDA_CHECK(cudaRuntimeGetVersion(&runtime));
  C10_CUDA_CHECK(cudaDriverGetVersion(&driver));
  DeviceFacts facts;
  facts.name = properties.name;
  facts.versions = "CUDA " + cuda_version(runtime) + ", driver for " + cuda_version(driver);
  const auto& hooks = at::detail::getCUDAHooks();
  if (hooks.hasCuDNN()) facts.versions += ", cuDNN " + cudnn_version(hooks.versionRuntimeCuDNN());
  facts.multiprocessors = properties.multiProcessorCount;
  facts.highest_mhz = khz / 1000;
  return facts;
}

}  // namespace annulus
