// Chooses and makes kernels; see choose_kernel.h.
#include "attention/kernels/choose_kernel.h"

#include <c10/util/Logging.h>

#include <mutex>
#include <set>

#include "attention/kernels/composed_kernel.h"
#include "attention/kernels/cpu/cpu_kernel.h"
#include "attention/kernels/detect.h"
#include "attention/kernels/library_operators.h"
#include "attention/kernels/reference_kernel.h"
#include "common/error.h"
#include "common/names.h"
#include "common/simd/instruction_set.h"

namespace annulus {
namespace {

[[noreturn]] void refuse_kernel(const std::string& message) { throw Error(ErrorKind::kUnavailable, "kernel", message); }

const std::vector<std::string>& names() {
  static const std::vector<std::string> table = {"reference", "cpu",    "efficient", "cudnn",
                                                 "flash2",    "flash3", "auto"};  // in the order of KernelKind
  return table;
}

// Before cuDNN 9.15.1 results are wrong for lengths that are not multiples of 128 (pytorch#169849).
constexpr int64_t kOldestCudnn = 91501;

// LibTorch's log, shown with TORCH_CPP_LOG_LEVEL=INFO: each choice the first time it is made.
void log_once(const std::string& reason) {
  static std::mutex mutex;
  static std::set<std::string>& said = *new std::set<std::string>;
  const std::lock_guard lock(mutex);
  if (said.insert(reason).second) LOG(INFO) << "attention kernel: " << reason;
}

// What the operators of libraries leave to dense blocks.
std::string dense_parts(bool dropout, bool softcap) {
  if (!dropout && !softcap) return "";
  return std::string("; ") +
         (!softcap   ? "dropout falls"
          : !dropout ? "a soft cap falls"
                     : "dropout and a soft cap fall") +
         " back to dense blocks";
}

}  // namespace

std::string_view to_string(KernelKind kind) { return names()[static_cast<size_t>(kind)]; }

KernelKind parse_kernel(std::string_view name, std::string_view where) {
  return static_cast<KernelKind>(index_of_name(name, names(), "kernel", where));
}

KernelChoice choose_kernel(KernelKind asked, at::DeviceType device, at::ScalarType type, int64_t head_dim, bool dropout,
                           bool softcap) {
  if (asked == KernelKind::kReference) return {asked, "reference, as asked: dense fp64, slow"};
  if (type != at::kFloat && type != at::kDouble && type != at::kBFloat16 && type != at::kHalf) {
    refuse_kernel(std::string("no kernel takes ") + c10::toString(type) + "; use fp32, fp64, bf16 or fp16");
  }
  if (device == at::kCUDA && !gpu_abilities().name.empty()) {
    return choose_gpu_kernel(asked, gpu_abilities(), type, head_dim, dropout, softcap);
  }
  if (device != at::kCPU) {
    std::string looked_for;
    for (const DetectedKernel& kernel : detected_kernels()) {
      looked_for += (looked_for.empty() ? "" : "; ") + kernel.name + ": " + (kernel.found ? "" : "no, ") + kernel.note;
    }
    refuse_kernel("no kernel computes on " + c10::DeviceTypeName(device, true) + " here (" + looked_for +
                  "); use device = \"cpu\", or kernel = \"reference\" to check results");
  }
  const bool half = type == at::kBFloat16 || type == at::kHalf;
  const std::string computes = half ? std::string("; computes ") + c10::toString(type) + " in fp32" : "";
  if (asked == KernelKind::kEfficient) {
    return {asked, "efficient, as asked: LibTorch's flash attention operator on CPU" + computes +
                       dense_parts(dropout, softcap)};
  }
  if (asked != KernelKind::kCpu && asked != KernelKind::kAuto) {
    refuse_kernel("kernel \"" + std::string(to_string(asked)) +
                  "\" needs tensors on a GPU, got tensors on the CPU; use kernel = \"auto\", or device = \"cuda\"");
  }
  const bool pairs = type == at::kBFloat16 && head_dim % 2 == 0;  // tile_math_of_pairs
  return {KernelKind::kCpu, std::string(asked == KernelKind::kAuto ? "cpu: " : "cpu, as asked: ") +
                                "flash attention on CPU, head size " + std::to_string(head_dim) + ", " +
                                instruction_set_name(instructions_for(pairs)) +
                                (instructions_for(pairs) > InstructionSet::kAvx512 ? "" : computes)};
}

KernelChoice choose_gpu_kernel(KernelKind asked, const GpuAbilities& gpu, at::ScalarType type, int64_t head_dim,
                               bool dropout, bool softcap) {
  const bool half = type == at::kBFloat16 || type == at::kHalf;
  const int64_t size = ceil_div(head_dim, 8) * 8;  // the padded size that operators get
  // Why a kernel cannot be used; empty if it can.
  const auto obstacle = [&](KernelKind kind) -> std::string {
    if (kind == KernelKind::kCpu) return "it computes on CPUs";
    if (kind == KernelKind::kEfficient) {
      if (type == at::kDouble) return "it takes fp32, fp16 and bf16";
      return type == at::kBFloat16 && gpu.capability < 80 ? "bf16 needs compute capability 8.0" : "";
    }
    if (!half) return "it takes bf16 and fp16";
    if (gpu.capability < 80) return "it needs compute capability 8.0";
    if (kind == KernelKind::kFlash3) {
      if (!gpu.flash3_obstacle.empty()) return gpu.flash3_obstacle;
      if (gpu.capability / 10 != 9) return "it is for Hopper GPUs";
    }
    if (kind == KernelKind::kCudnn && gpu.cudnn < kOldestCudnn) {
      return gpu.cudnn == 0 ? "LibTorch is built without cuDNN" : "it needs cuDNN 9.15.1 or newer";
    }
    if (kind == KernelKind::kFlash2 && !gpu.flash2) return "LibTorch is built without FlashAttention";
    if (deterministic_only()) {
      if (kind == KernelKind::kCudnn) return "its backward is not deterministic";
      if (kind == KernelKind::kFlash3 && size > 192) return "its backward is not deterministic for this head size";
    }
    // cuDNN 9.19 claims to take head sizes up to 256 on Hopper, but later versions of LibTorch no longer rely on that.
    const int64_t most = kind == KernelKind::kCudnn ? 128 : 256;
    return size > most ? "it takes head sizes up to " + std::to_string(most) + " here" : "";
  };
  const std::string inputs = std::string(c10::toString(type)) + ", head size " + std::to_string(head_dim) + ", on " +
                             gpu.name + dense_parts(dropout, softcap);
  const auto besides = [&](KernelKind kind) -> std::string {
    if (kind != KernelKind::kCudnn) return "";
    return std::string("; windows, gathered blocks and ever new shapes by ") + (gpu.flash2 ? "flash2" : "efficient");
  };
  if (asked != KernelKind::kAuto) {
    const std::string why_not = obstacle(asked);
    if (why_not.empty()) return {asked, std::string(to_string(asked)) + ", as asked: " + inputs + besides(asked)};
    refuse_kernel("kernel \"" + std::string(to_string(asked)) + "\" cannot be used for " + inputs + ": " + why_not +
                  "; use kernel = \"auto\"");
  }
  std::string passed;  // why faster kernels are not used
  for (const KernelKind kind : {KernelKind::kFlash3, KernelKind::kCudnn, KernelKind::kFlash2, KernelKind::kEfficient}) {
    const std::string why_not = obstacle(kind);
    if (why_not.empty()) return {kind, std::string(to_string(kind)) + ": " + inputs + besides(kind) + passed};
    passed += "; not " + std::string(to_string(kind)) + ": " + why_not;
  }
  return {KernelKind::kReference, "reference: dense fp64, slow: " + inputs + passed};
}

KernelKind planned_kernel(KernelKind asked, at::DeviceType device, at::ScalarType type, int64_t head_dim, bool dropout,
                          bool softcap) {
  if (device != at::kCUDA || !gpu_abilities().name.empty()) {
    return choose_kernel(asked, device, type, head_dim, dropout, softcap).kind;
  }
  GpuAbilities gpu;
  gpu.name = "a GPU that is not here";
  gpu.capability = 90;
  gpu.cudnn = kOldestCudnn;
  gpu.flash2 = true;
  return choose_gpu_kernel(asked, gpu, type, head_dim, dropout, softcap).kind;
}

std::unique_ptr<Kernel> make_chosen_kernel(KernelKind chosen, at::DeviceType device, at::ScalarType type) {
  switch (chosen) {
    case KernelKind::kReference:
      return make_reference_kernel();
    case KernelKind::kEfficient:
      return make_composed_kernel({device == at::kCPU ? cpu_flash_operator() : efficient_operator()});
    case KernelKind::kCudnn:
      // FlashAttention 2 computes what cuDNN's operator does not take. LibTorch is usually built with both; without
      // FlashAttention 2 the efficient operator does it.
      return make_composed_kernel(
          {cudnn_operator(), gpu_abilities().flash2 ? flash2_operator() : efficient_operator()});
    case KernelKind::kFlash2:
      return make_composed_kernel({flash2_operator()});
    case KernelKind::kFlash3:
      return make_composed_kernel({flash3_operator()});
    default:
      return make_cpu_kernel(type);
  }
}

std::unique_ptr<Kernel> make_kernel(KernelKind kind, const at::Tensor& q, bool dropout, bool softcap) {
  const KernelChoice choice = choose_kernel(kind, q.device().type(), q.scalar_type(), q.size(-1), dropout, softcap);
  log_once(choice.reason);
  return make_chosen_kernel(choice.kind, q.device().type(), q.scalar_type());
}

}  // namespace annulus
