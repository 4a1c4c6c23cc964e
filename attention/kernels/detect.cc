// See detect.h.
#include "attention/kernels/detect.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include "attention/kernels/row_math.h"

#ifdef ANNULUS_CUDA
#include <ATen/cuda/CUDAContext.h>
#include <ATen/detail/CUDAHooksInterface.h>
#endif

namespace annulus {
namespace {

#ifdef ANNULUS_CUDA

// Registered, and for GPUs: LibTorch names operators whose kernels come with another library.
bool has_gpu_operator(const char* name) {
  const auto found = c10::Dispatcher::singleton().findSchema({name, ""});
  return found && found->hasKernelForDispatchKey(c10::DispatchKey::CUDA);
}

GpuAbilities look_at_gpu() {
  GpuAbilities gpu;
  if (c10::cuda::device_count() == 0) return gpu;
  const cudaDeviceProp* properties = at::cuda::getDeviceProperties(0);
  gpu.name = properties->name;
  gpu.capability = properties->major * 10 + properties->minor;
  const auto& hooks = at::detail::getCUDAHooks();
  if (hooks.compiledWithCuDNN() && has_gpu_operator("aten::_scaled_dot_product_cudnn_attention")) {
    gpu.cudnn = hooks.versionRuntimeCuDNN();
  }
  gpu.flash2 = has_gpu_operator("aten::_flash_attention_forward");
  gpu.flash3 = has_gpu_operator("flash_attn_3::fwd");
  return gpu;
}

#else

GpuAbilities look_at_gpu() { return {}; }

#endif

std::vector<DetectedKernel> look() {
  const GpuAbilities& gpu = gpu_abilities();
  const auto on_gpu = [&gpu](const char* name, const char* inputs, bool there, const std::string& found,
                             const char* missing) {
    const bool any = !gpu.name.empty();
    return DetectedKernel{name, inputs, any && there,
                          !any    ? "no GPU that this build can use"
                          : there ? found
                                  : missing};
  };
  const std::string of_torch = "operator of LibTorch";
  return {
      on_gpu("FlashAttention 3", "bf16, fp16; head sizes to 256; Hopper GPUs", gpu.flash3, "operator flash_attn_3::fwd",
             "no operator flash_attn_3::fwd: its package is not loaded"),
      on_gpu("cuDNN", "bf16, fp16; head sizes to 128", gpu.cudnn > 0,
             of_torch + ", cuDNN " + std::to_string(gpu.cudnn / 10000) + "." + std::to_string(gpu.cudnn / 100 % 100) +
                 "." + std::to_string(gpu.cudnn % 100),
             "LibTorch is built without cuDNN"),
      on_gpu("FlashAttention 2", "bf16, fp16; head sizes to 256; windows", gpu.flash2, of_torch,
             "LibTorch is built without FlashAttention"),
      on_gpu("efficient", "fp32, fp16, bf16; any head size; with dropout in dense blocks", true, of_torch, ""),
      {"CPU", "fp32, fp64, bf16 and fp16 in fp32; any head size; with dropout", true,
       "flash attention on LibTorch's matrix products, " + std::string(row_math_instructions())},
  };
}

}  // namespace

const GpuAbilities& gpu_abilities() {
  static const GpuAbilities gpu = look_at_gpu();
  return gpu;
}

const std::vector<DetectedKernel>& detected_kernels() {
  static const std::vector<DetectedKernel> table = look();
  return table;
}

}  // namespace annulus
