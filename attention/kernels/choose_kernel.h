// Which kernel computes a call: asked for by name, or the fastest that its inputs allow. Used by the executor, and by
// who says beforehand what will be used: trainer, `attend`, `doctor`.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <string_view>

#include "attention/kernels/kernel.h"

namespace annulus {

enum class KernelKind {
  kReference,  // dense fp64 over each tile: the oracle's cousin, any pattern, slow
  kCpu,        // annulus's own flash attention (cpu_flash/), CPU
  kEfficient,  // a library's operators, composed (composed_kernel.h): LibTorch's efficient attention; on CPUs its flash
  kCudnn,      // likewise: cuDNN, GPU; bands and small blocks by FlashAttention 2
  kFlash2,     // likewise: FlashAttention 2, GPU
  kFlash3,     // likewise: FlashAttention 3, Hopper GPUs
  kAuto,       // the fastest that can be used for the inputs; see choose_kernel
};

std::string_view to_string(KernelKind kind);  // "reference", "cpu", "efficient", "cudnn", "flash2", "flash3", "auto"
KernelKind parse_kernel(std::string_view name, std::string_view where);

// What is used for such inputs, and why; what there is: detect.h. `asked` kAuto: the fastest that can be used. A choice
// that falls back says so in `reason`. Raises Error(kUnavailable) where no kernel takes them, saying why and what to
// use. Thread-safe.
struct KernelChoice {
  KernelKind kind = KernelKind::kCpu;  // never kAuto
  std::string reason;                  // one line
};
KernelChoice choose_kernel(KernelKind asked, at::DeviceType device, at::ScalarType type, int64_t head_dim,
                           bool dropout);

// Of tensors on a GPU with these abilities: what choose_kernel comes to, for a test to ask about GPUs that are not
// there.
struct GpuAbilities;
KernelChoice choose_gpu_kernel(KernelKind asked, const GpuAbilities& gpu, at::ScalarType type, int64_t head_dim,
                               bool dropout);

// What `auto` and names come to in a memory plan: on a GPU that is not there, one that has all but FlashAttention 3's
// package is taken for it. Raises as choose_kernel.
KernelKind planned_kernel(KernelKind asked, at::DeviceType device, at::ScalarType type, int64_t head_dim, bool dropout);
// Of a kind that was chosen for such tensors.
std::unique_ptr<Kernel> make_chosen_kernel(KernelKind chosen, at::DeviceType device, at::ScalarType type);

// The chosen kernel; its reason goes to the log once. Raises as choose_kernel.
std::unique_ptr<Kernel> make_kernel(KernelKind kind, const at::Tensor& q, bool dropout = false);

}  // namespace annulus
