// See device.h.
#include "launcher/device.h"

#include <algorithm>
#include <cstdlib>

#include "comm/nccl/nccl_communicator.h"
#include "common/environment.h"
#include "common/error.h"
#include "common/text.h"
#include "launcher/rank_locations.h"
#include "launcher/topology/machine.h"

#ifdef ANNULUS_CUDA
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <array>
#include <vector>

#include "attention/kernels/choose_kernel.h"
#include "launcher/launch/rank_place.h"
#endif

namespace annulus {
namespace {

#ifdef ANNULUS_CUDA

// CUDA's number of the rank's GPU. All ranks of a host see the same GPUs and therefore compute the same placement.
int gpu_of(int local_rank, int local_size, int job_size) {
  // Ranks that are allowed to share GPUs take them in turn.
  if (c10::cuda::device_count() < local_size) return local_rank % c10::cuda::device_count();
  std::vector<std::string> visible;
  for (int i = 0; i < c10::cuda::device_count(); ++i) {
    std::array<char, 32> id{};
    if (cudaDeviceGetPCIBusId(id.data(), static_cast<int>(id.size()), i) !=
        cudaSuccess) {  // for example a part of a GPU (MIG)
      cudaGetLastError();
      return local_rank;
    }
    visible.push_back(normalize_pci_bus_id(id.data()));
  }
  rank_place().place_on_gpus(visible, local_size, job_size);
  const std::string& own = rank_place().ranks().at(local_rank).gpu_pci;
  return static_cast<int>(std::find(visible.begin(), visible.end(), own) - visible.begin());
}

// Makes the rank's GPU the current device. Returns the reason why it cannot be used, or "" if it can.
std::string take_gpu(int local_rank, int local_size, int job_size, int& ordinal) {
  if (access("/dev/nvidiactl", F_OK) != 0) return "no NVIDIA driver on this host";
  const int count = c10::cuda::device_count();
  if (count == 0) return "LibTorch finds no GPU that it can use";
  const std::string remedy = count < local_size ? nccl_sharing_remedy() : "";
  if (!remedy.empty()) {
    return counted(local_size, "rank") + " on this host, but " + counted(count, "GPU") +
           ": each rank needs one, or, to try several ranks on one GPU, " + remedy +
           (std::getenv("CUDA_VISIBLE_DEVICES") != nullptr ? "; CUDA_VISIBLE_DEVICES is set: let every rank see all "
                                                             "GPUs of its host (unset it; with Slurm's srun: "
                                                             "--gpu-bind=none)"
                                                           : "");
  }
  // choose_kernel throws if no kernel can compute on this GPU.
  try {
    ordinal = gpu_of(local_rank, local_size, job_size);
    c10::cuda::set_device(static_cast<c10::DeviceIndex>(ordinal));
    choose_kernel(KernelKind::kAuto, at::kCUDA, at::kFloat, 64, /*dropout=*/false);
  } catch (const Error& error) {
    return error.what();
  } catch (const c10::Error& error) {  // for example an unsuitable driver, or no memory left on the GPU
    return error.what_without_backtrace();
  }
  return "";
}

int visible_gpus() { return c10::cuda::device_count(); }

#else

int visible_gpus() { return 0; }

std::string take_gpu(int, int, int, int&) {
  return Machine::this_machine().gpus.empty() ? "this host has no GPU"
                                              : "this host has a GPU, but this build has no CUDA";
}

#endif

}  // namespace

std::string cuda_shortfall(int local_size) {
  int ordinal = 0;
  return take_gpu(0, local_size, local_size, ordinal);
}

int cuda_devices() { return visible_gpus(); }

DeviceChoice choose_device(const std::string& wanted, int local_rank, int local_size, int job_size) {
  if (wanted == "cpu") return {at::kCPU, "cpu (as configured)"};
  int ordinal = 0;
  const std::string shortfall = take_gpu(local_rank, std::max(1, local_size), std::max(1, job_size), ordinal);
  if (shortfall.empty()) {
    return {at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(ordinal)),
            wanted == "cuda" ? "cuda (as configured)" : "cuda (a GPU for each rank)"};
  }
  if (wanted == "cuda") {
    throw Error(ErrorKind::kUnavailable, "launcher",
                "device = \"cuda\" is not available: " + shortfall + "; use device = \"auto\" or \"cpu\"");
  }
  return {at::kCPU, "cpu (" + shortfall + ")"};
}

DeviceChoice choose_devices(Job& job, const std::string& wanted) {
  DeviceChoice choice;
  job.run_together({"choosing a device", 0},
                   [&] { choice = choose_device(wanted, job.local_rank, job.local_size, job.size); });
  job.require_agreement({{"device", choice.device.is_cuda() ? "cuda" : "cpu"}}, {"comparing devices", 0});
  bind_to_device(job, choice.device.is_cuda());
  return choice;
}

std::shared_ptr<Communicator> connect_devices(Job& job, const DeviceChoice& choice) {
  if (!choice.device.is_cuda() || job.size == 1) return nullptr;
  NcclOptions options;
  options.device = choice.device.index();
  options.timeout = Seconds(number_from_environment("ANNULUS_BOOTSTRAP_TIMEOUT", 60, 0.1, 86400));
  std::shared_ptr<Communicator> comm;
  // make_nccl_communicator fails on all ranks together as far as they can still communicate. run_together reports what
  // fails on only some of them.
  job.run_together({"connecting the GPUs", 0}, [&] { comm = make_nccl_communicator(*job.world, options); });
  comm->set_timeout(job.world->timeout());
  return comm;
}

}  // namespace annulus
