// The launcher for GPUs; see launcher.h. Built with --config=cuda.
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include "runtime/model/gpu/cuda_launch.h"
#include "runtime/model/gpu/launcher.h"

namespace annulus::gpu {
namespace {

class CudaLauncher : public Launcher {
 public:
  void start(const NormArguments& a, c10::Device device) const override { start_any(a, device); }
  void start(const NormGradientArguments& a, c10::Device device) const override { start_any(a, device); }
  void start(const ColumnArguments& a, c10::Device device) const override { start_any(a, device); }
  void start(const RotaryArguments& a, c10::Device device) const override { start_any(a, device); }
  void start(const SwiGluArguments& a, c10::Device device) const override { start_any(a, device); }
  void start(const CrossEntropyArguments& a, c10::Device device) const override { start_any(a, device); }

 private:
  template <typename Arguments>
  static void start_any(const Arguments& arguments, c10::Device device) {
    const c10::cuda::CUDAGuard guard(device);
    C10_CUDA_CHECK(launch(arguments, at::cuda::getCurrentCUDAStream().stream()));
  }
};

}  // namespace

const Launcher& cuda_launcher() {
  static const CudaLauncher launcher;
  return launcher;
}

}  // namespace annulus::gpu
