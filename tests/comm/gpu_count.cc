// See gpu_count.h.
#include "tests/comm/gpu_count.h"

#ifdef WITH_CUDA
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <stdlib.h>
#endif

#include "comm/nccl/nccl_communicator.h"

namespace annulus::comm_test {

#ifdef WITH_CUDA
int gpu_count() {
  int n = 0;
  return cudaGetDeviceCount(&n) == cudaSuccess ? n : 0;
}
void use_gpu(int device) { cudaSetDevice(device); }

int gpu_of_process(int rank, int ranks) {
  const int count = gpu_count();
  if (count == 0 || ranks <= count) return rank;
  int version = 0;
  ncclGetVersion(&version);
  if (version >= NCCL_VERSION(2, 30, 0)) {
    setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", /*overwrite=*/1);
  } else {
    setenv("NCCL_HOSTID", ("process-" + std::to_string(rank)).c_str(), /*overwrite=*/1);
  }
  return rank % count;
}

namespace {
std::string sharing_refused(int ranks) {
  const int count = gpu_count();
  if (ranks <= count) return "";
  for (int device = 0; device < count; ++device) {
    int mode = cudaComputeModeDefault;
    cudaDeviceGetAttribute(&mode, cudaDevAttrComputeMode, device);
    if (mode != cudaComputeModeDefault) {
      return std::to_string(ranks) + " ranks on " + std::to_string(count) + " GPUs, and GPU " + std::to_string(device) +
             " takes one process (its compute mode is " + std::to_string(mode) + ", not the default)";
    }
  }
  return "";
}
}  // namespace
#else
int gpu_count() { return 0; }
void use_gpu(int) {}
int gpu_of_process(int rank, int) { return rank; }
namespace {
std::string sharing_refused(int) { return ""; }
}  // namespace
#endif

std::string unavailable_to_processes(int ranks) {
  const std::string why = nccl_unavailable();
  return why.empty() ? sharing_refused(ranks) : why;
}

}  // namespace annulus::comm_test
