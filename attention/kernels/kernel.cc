// See kernel.h.
#include "attention/kernels/kernel.h"

#include "attention/kernels/kernels.h"
#include "common/error.h"
#include "common/names.h"

namespace annulus {
namespace {

const std::vector<std::string>& names() {
  static const std::vector<std::string> table = {"reference", "aten", "auto"};  // in the order of KernelKind
  return table;
}

}  // namespace

std::string_view to_string(KernelKind kind) { return names()[static_cast<size_t>(kind)]; }

KernelKind parse_kernel(std::string_view name, std::string_view where) {
  return static_cast<KernelKind>(index_of_name(name, names(), "kernel", where));
}

KernelChoice choose_kernel(KernelKind asked, at::DeviceType device, at::ScalarType, int64_t, bool) {
  if (asked != KernelKind::kAuto) return {asked, "as asked"};
  return {KernelKind::kAten, device == at::kCPU ? "LibTorch's CPU kernels" : "no GPU kernel yet"};
}

std::unique_ptr<Kernel> make_kernel(KernelKind kind, const at::Tensor& q) {
  if (kind == KernelKind::kReference) return make_reference_kernel();
  if (!q.is_cpu()) {
    throw Error(ErrorKind::kUnavailable, "kernel",
                "kernel \"aten\" computes on CPUs only so far, got tensors on " + q.device().str() +
                    "; use device = \"cpu\", or kernel = \"reference\" to check results");
  }
  return make_aten_kernel(q.scalar_type());
}

}  // namespace annulus
