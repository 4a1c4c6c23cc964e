// See gpu_count.h.
#include "tests/comm/gpu_count.h"

#ifdef WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace annulus::comm_test {

#ifdef WITH_CUDA
int gpu_count() {
  int n = 0;
  return cudaGetDeviceCount(&n) == cudaSuccess ? n : 0;
}
void use_gpu(int device) { cudaSetDevice(device); }
#else
int gpu_count() { return 0; }
void use_gpu(int) {}
#endif

}  // namespace annulus::comm_test
