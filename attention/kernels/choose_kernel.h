// Chooses the kernel of a call: the one requested by name, or the fastest that supports its inputs. Used by the
// executor, and by code that reports or plans with the choice (training, `attend`, `logits`, `doctor`, python/ops). The
// kernels for GPUs have never run on one.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <string_view>

#include "attention/tiles/kernel.h"

namespace annulus {

enum class KernelKind {
  kReference,  // dense fp64 over each tile, for any pattern and device; slow
  kCpu,        // annulus's own flash attention on CPUs (attention/kernels/cpu)
  kEfficient,  // composed (composed_kernel.h) of LibTorch's memory-efficient attention, on CPUs of its flash attention
  kCudnn,      // composed of cuDNN's operator on GPUs, with FlashAttention 2 for bands and small blocks
  kFlash2,     // composed of FlashAttention 2 on GPUs
  kFlash3,     // composed of FlashAttention 3 on Hopper GPUs
  kAuto,       // the fastest that supports the inputs (choose_kernel)
};

std::string_view to_string(KernelKind kind);  // "reference", "cpu", "efficient", "cudnn", "flash2", "flash3", "auto"
// Raises Error(kUsage), which suggests the nearest, for another name; `where` is as in parse_pattern.
KernelKind parse_kernel(std::string_view name, std::string_view where);

// Chooses among the kernels that detect.h finds. For kAuto the choice is the fastest usable one, and `reason` includes
// why faster ones are unusable. Raises Error(kUnavailable), with the reason and an alternative, if no kernel, or not
// the requested one, supports the inputs. Thread safe.
struct KernelChoice {
  KernelKind kind = KernelKind::kCpu;  // never kAuto
  std::string reason;                  // one line
};
// Dropout and a soft cap of the scores, which no library's operator computes, are left to dense blocks by kernels other
// than `cpu` and `reference`.
KernelChoice choose_kernel(KernelKind asked, at::DeviceType device, at::ScalarType type, int64_t head_dim, bool dropout,
                           bool softcap = false);

// Chooses for a GPU with these abilities, which need not exist (for tests).
struct GpuAbilities;
KernelChoice choose_gpu_kernel(KernelKind asked, const GpuAbilities& gpu, at::ScalarType type, int64_t head_dim,
                               bool dropout, bool softcap = false);

// Returns the kernel that a memory plan assumes. On a machine without a GPU it assumes one with compute capability 9.0
// and all libraries except FlashAttention 3's package. Raises the errors of choose_kernel.
KernelKind planned_kernel(KernelKind asked, at::DeviceType device, at::ScalarType type, int64_t head_dim, bool dropout,
                          bool softcap = false);
// Makes a kernel of a kind returned by choose_kernel for this device and dtype of q.
std::unique_ptr<Kernel> make_chosen_kernel(KernelKind chosen, at::DeviceType device, at::ScalarType type);

// Chooses and makes the kernel for a call with this q, and logs each reason once. Raises the errors of choose_kernel.
std::unique_ptr<Kernel> make_kernel(KernelKind kind, const at::Tensor& q, bool dropout = false, bool softcap = false);

}  // namespace annulus
