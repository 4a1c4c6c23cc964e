// See device.h.
#include "launcher/device.h"

#include <algorithm>

#include "comm/topology/machine.h"
#include "common/error.h"

#ifdef ANNULUS_CUDA
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include "attention/execution/attention.h"
#endif

namespace annulus {

#ifdef ANNULUS_CUDA

std::string cuda_shortfall(int local_size) {
  if (access("/dev/nvidiactl", F_OK) != 0) return "no NVIDIA driver on this host";
  const int count = c10::cuda::device_count();
  if (count == 0) return "LibTorch finds no GPU that it can use";
  if (count < local_size) {
    return std::to_string(local_size) + " ranks on this host, but " + std::to_string(count) +
           " GPUs: one each is needed";
  }
  // The kernel decides for itself what it can compute on.
  try {
    make_kernel(KernelKind::kAten, at::empty({1, 1, 1, 64}, at::TensorOptions().device(at::kCUDA).dtype(at::kFloat)));
  } catch (const Error& error) {
    return error.what();
  } catch (const c10::Error& error) {  // a driver that does not suit, no memory left on the GPU
    return error.what_without_backtrace();
  }
  return "";
}

#else

std::string cuda_shortfall(int) {
  return Machine::this_machine().gpus.empty() ? "this host has no GPU"
                                              : "this host has a GPU, but this build has no CUDA";
}

#endif

DeviceChoice choose_device(const std::string& wanted, int local_rank, int local_size) {
  if (wanted == "cpu") return {at::kCPU, "cpu (as configured)"};
  const std::string shortfall = cuda_shortfall(std::max(1, local_size));
  if (shortfall.empty()) {
    return {at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(local_rank)),
            wanted == "cuda" ? "cuda (as configured)" : "cuda (a GPU for each rank)"};
  }
  if (wanted == "cuda") {
    throw Error(ErrorKind::kUnavailable, "launcher",
                "device = \"cuda\" cannot be had: " + shortfall + "; use device = \"auto\" or \"cpu\"");
  }
  return {at::kCPU, "cpu (" + shortfall + ")"};
}

}  // namespace annulus
