// See gpu_precision.h.
#include "runtime/training/gpu_precision.h"

#include <ATen/Context.h>

#include <cstdlib>
#include <mutex>

namespace annulus {

void set_gpu_precision(const GpuPrecision& precision) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  // cuBLAS adds in a fixed order only with workspaces of fixed sizes (its manual, "Results reproducibility").
  if (precision.deterministic) setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
  at::Context& context = at::globalContext();
  context.setAllowTF32CuBLAS(precision.tf32);
  context.setAllowTF32CuDNN(precision.tf32);
  context.setDeterministicAlgorithms(precision.deterministic, /*warn_only=*/false);
  context.setDeterministicCuDNN(precision.deterministic);
  // Every tensor is written before it is read, so filling each with NaN first would only cost time.
  context.setDeterministicFillUninitializedMemory(false);
}

}  // namespace annulus
