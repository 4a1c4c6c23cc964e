// Looks for GPUs and the libraries for them; see detect.h.
#include "attention/kernels/detect.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include "common/simd/instruction_set.h"

#ifdef ANNULUS_CUDA
#include <ATen/cuda/CUDAContext.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "attention/kernels/library_operators.h"
#endif

namespace annulus {
namespace {

#ifdef ANNULUS_CUDA

// Whether the operator is registered with a kernel for GPUs. LibTorch also registers operators whose kernels come with
// another library.
bool has_gpu_operator(const char* name) {
  const auto found = c10::Dispatcher::singleton().findSchema({name, ""});
  return found && found->hasKernelForDispatchKey(c10::DispatchKey::CUDA);
}

// Why FlashAttention 3 cannot be called, or empty if its operators are there with the arguments that
// attention/kernels/library_operators.cc passes. The package registers its operators when its library is loaded.
// Python programs load it themselves; for other programs ANNULUS_FLASH3 names the file (flash_attn_3/_C.abi3.so).
std::string flash3_obstacle() {
  const char* const path = std::getenv("ANNULUS_FLASH3");
  if (path != nullptr && *path != '\0' && dlopen(path, RTLD_LAZY | RTLD_GLOBAL) == nullptr) {
    return std::string("ANNULUS_FLASH3 cannot be loaded: ") + dlerror();
  }
  for (const auto& [name, arguments] : {std::pair{"flash_attn_3::fwd", flash3_forward_arguments()},
                                        {"flash_attn_3::bwd", flash3_backward_arguments()}}) {
    if (!has_gpu_operator(name)) {
      return std::string("no operator ") + name + ": its package is not loaded (set ANNULUS_FLASH3 to its library)";
    }
    const auto& known = c10::Dispatcher::singleton().findSchema({name, ""})->schema().arguments();
    for (const std::string& argument : arguments) {
      if (std::none_of(known.begin(), known.end(), [&](const c10::Argument& a) { return a.name() == argument; })) {
        return std::string(name) + " in this version of its package has no argument " + argument;
      }
    }
  }
  return "";
}

GpuAbilities look_at_gpu() {
  GpuAbilities gpu;
  if (c10::cuda::device_count() == 0) return gpu;
  const cudaDeviceProp* properties = at::cuda::getDeviceProperties(0);
  gpu.name = properties->name;
  gpu.capability = properties->major * 10 + properties->minor;
  gpu.multiprocessors = properties->multiProcessorCount;
  const auto& hooks = at::detail::getCUDAHooks();
  if (hooks.compiledWithCuDNN() && has_gpu_operator("aten::_scaled_dot_product_cudnn_attention")) {
    gpu.cudnn = hooks.versionRuntimeCuDNN();
  }
  gpu.flash2 = has_gpu_operator("aten::_flash_attention_forward");
  gpu.flash3_obstacle = flash3_obstacle();
  return gpu;
}

constexpr bool kBuiltForCuda = true;

#else

GpuAbilities look_at_gpu() { return {}; }
constexpr bool kBuiltForCuda = false;

#endif

std::vector<DetectedKernel> look() {
  const GpuAbilities& gpu = gpu_abilities();
  const auto on_gpu = [&gpu](const char* name, const char* inputs, bool there, const std::string& found,
                             const std::string& missing) {
    const bool any = !gpu.name.empty();
    return DetectedKernel{name, inputs, any && there,
                          !any    ? "no GPU that this build can use"
                          : there ? found
                                  : missing};
  };
  const std::string of_torch = "operator of LibTorch";
  return {
      on_gpu("FlashAttention 3", "bf16, fp16; head sizes up to 256; Hopper GPUs", gpu.flash3_obstacle.empty(),
             "operators flash_attn_3::fwd and bwd", gpu.flash3_obstacle),
      on_gpu("cuDNN", "bf16, fp16; head sizes up to 128", gpu.cudnn > 0,
             of_torch + ", cuDNN " + std::to_string(gpu.cudnn / 10000) + "." + std::to_string(gpu.cudnn / 100 % 100) +
                 "." + std::to_string(gpu.cudnn % 100),
             "LibTorch is built without cuDNN"),
      on_gpu("FlashAttention 2", "bf16, fp16; head sizes up to 256; windows", gpu.flash2, of_torch,
             "LibTorch is built without FlashAttention"),
      on_gpu("efficient", "fp32, fp16, bf16; any head size; with dropout in dense blocks", true, of_torch, ""),
      {"CPU", "fp32, fp64, bf16 and fp16 in fp32; any head size; with dropout", true,
       "annulus's own flash attention, " + std::string(instruction_set_name(instruction_set()))},
  };
}

}  // namespace

bool built_for_cuda() { return kBuiltForCuda; }

const GpuAbilities& gpu_abilities() {
  static const GpuAbilities gpu = look_at_gpu();
  return gpu;
}

const std::vector<DetectedKernel>& detected_kernels() {
  static const std::vector<DetectedKernel> table = look();
  return table;
}

}  // namespace annulus
