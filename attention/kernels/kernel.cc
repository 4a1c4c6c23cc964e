// See kernel.h.
#include "attention/kernels/kernel.h"

#include <c10/util/Logging.h>

#include <mutex>
#include <set>

#include "attention/kernels/detect.h"
#include "attention/kernels/kernels.h"
#include "attention/kernels/row_math.h"
#include "common/error.h"
#include "common/names.h"

namespace annulus {
namespace {

const std::vector<std::string>& names() {
  static const std::vector<std::string> table = {"reference", "aten", "auto"};  // in the order of KernelKind
  return table;
}

// LibTorch's log, shown with TORCH_CPP_LOG_LEVEL=INFO: each choice the first time it is made.
void log_once(const std::string& reason) {
  static std::mutex mutex;
  static std::set<std::string>& said = *new std::set<std::string>;
  const std::lock_guard lock(mutex);
  if (said.insert(reason).second) LOG(INFO) << "attention kernel: " << reason;
}

}  // namespace

std::string_view to_string(KernelKind kind) { return names()[static_cast<size_t>(kind)]; }

KernelKind parse_kernel(std::string_view name, std::string_view where) {
  return static_cast<KernelKind>(index_of_name(name, names(), "kernel", where));
}

KernelChoice choose_kernel(KernelKind asked, at::DeviceType device, at::ScalarType type, int64_t head_dim,
                           bool dropout) {
  if (asked == KernelKind::kReference) return {asked, "reference, as asked: dense fp64, slow"};
  if (type != at::kFloat && type != at::kDouble && type != at::kBFloat16 && type != at::kHalf) {
    throw Error(ErrorKind::kUnavailable, "kernel",
                std::string("no kernel takes ") + c10::toString(type) + "; use fp32, fp64, bf16 or fp16");
  }
  if (device != at::kCPU) {
    std::string found, missing;
    for (const DetectedKernel& kernel : detected_kernels()) {
      if (kernel.used) continue;
      std::string& list = kernel.found ? found : missing;
      list += (list.empty() ? "" : ", ") + kernel.name + (kernel.found ? "" : " (" + kernel.note + ")");
    }
    throw Error(ErrorKind::kUnavailable, "kernel",
                "annulus computes attention on CPUs only so far, got tensors on " + c10::DeviceTypeName(device, true) +
                    " (kernels found here: " + (found.empty() ? "none" : found) +
                    (missing.empty() ? "" : "; missing: " + missing) +
                    "); use device = \"cpu\", or kernel = \"reference\" to check results");
  }
  std::string reason = std::string(asked == KernelKind::kAuto ? "aten: " : "aten, as asked: ") +
                       "flash attention on CPU, head size " + std::to_string(head_dim) + ", " + row_math_instructions();
  if (type == at::kBFloat16 || type == at::kHalf)
    reason += std::string("; computes ") + c10::toString(type) + " in fp32";
  if (dropout) reason += "; dropout falls back to dense blocks";
  return {KernelKind::kAten, reason};
}

std::unique_ptr<Kernel> make_kernel(KernelKind kind, const at::Tensor& q, bool dropout) {
  const KernelChoice choice = choose_kernel(kind, q.device().type(), q.scalar_type(), q.size(-1), dropout);
  log_once(choice.reason);
  return choice.kind == KernelKind::kReference ? make_reference_kernel() : make_aten_kernel(q.scalar_type());
}

}  // namespace annulus
