// See detect.h.
#include "attention/kernels/detect.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include "attention/kernels/row_math.h"

namespace annulus {
namespace {

// Registered, and for GPUs: LibTorch names operators whose kernels come with another library.
bool has_gpu_operator(const char* name) {
  const auto found = c10::Dispatcher::singleton().findSchema({name, ""});
  return found && found->hasKernelForDispatchKey(c10::DispatchKey::CUDA);
}

std::vector<DetectedKernel> look() {
  const auto& cuda = at::detail::getCUDAHooks();
  const bool gpu = cuda.hasCUDA() && cuda.deviceCount() > 0;
  const auto on_gpu = [gpu](const char* name, const char* inputs, bool built, const char* missing) {
    const std::string note = !gpu    ? "no GPU that this build can use"
                             : built ? "operator of LibTorch's dispatcher"
                                     : missing;
    return DetectedKernel{name, inputs, gpu && built, note, false};
  };
  return {
      on_gpu("FlashAttention 3", "bf16, fp16; head sizes to 256; Hopper GPUs", has_gpu_operator("flash_attn_3::fwd"),
             "no operator flash_attn_3::fwd: its package is not loaded"),
      on_gpu("cuDNN", "bf16, fp16; head sizes to 128, multiples of 8",
             cuda.compiledWithCuDNN() && has_gpu_operator("aten::_scaled_dot_product_cudnn_attention"),
             "LibTorch is built without cuDNN"),
      on_gpu("FlashAttention 2", "bf16, fp16; head sizes to 256; with dropout",
             has_gpu_operator("aten::_flash_attention_forward"), "LibTorch is built without FlashAttention"),
      {"CPU", "fp32, fp64, bf16 and fp16 in fp32; any head size; with dropout", true,
       "flash attention on LibTorch's matrix products, " + std::string(row_math_instructions()), true},
  };
}

}  // namespace

const std::vector<DetectedKernel>& detected_kernels() {
  static const std::vector<DetectedKernel> table = look();
  return table;
}

}  // namespace annulus
