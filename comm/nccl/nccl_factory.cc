// Checks the requirements of a communicator over NCCL and makes it: see nccl_communicator.h.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <string>
#include <utility>
#include <vector>

#include "comm/agreement.h"
#include "comm/nccl/nccl_communicator.h"
#include "comm/nccl/nccl_handle.h"
#include "comm/nccl/nccl_internal.h"
#include "comm/nccl/shared_gpus.h"

namespace annulus {

using namespace nccl_internal;

std::string nccl_unavailable() {
  int devices = 0;
  const cudaError_t code = cudaGetDeviceCount(&devices);
  if (code != cudaSuccess) {
    cudaGetLastError();  // clears the error, so that the next CUDA call does not report it
    return std::string("no CUDA device: ") + cudaGetErrorString(code) + "; use device = \"cpu\"";
  }
  if (devices == 0) return "no CUDA device on this host; use device = \"cpu\"";
  return "";
}

std::string nccl_version() { return nccl_version_text(nccl_version_number()); }

std::string nccl_version_built() { return nccl_version_text(NCCL_VERSION_CODE); }

std::string nccl_sharing_remedy() { return gpu_sharing_remedy(nccl_version_number()); }

std::unique_ptr<Communicator> make_nccl_communicator(Communicator& host, const NcclOptions& options) {
  const OpLabel label{"starting NCCL", 0};
  std::string problem = nccl_unavailable();
  std::string pci;
  if (problem.empty()) {
    int devices = 0;
    cudaGetDeviceCount(&devices);
    char bus[32] = {};
    if (options.device < 0 || options.device >= devices) {
      problem = "no CUDA device " + std::to_string(options.device) + ": this host has " + std::to_string(devices);
    } else if (cudaDeviceGetPCIBusId(bus, sizeof bus, options.device) == cudaSuccess) {
      pci = bus;
    }
  }
  std::unique_ptr<Communicator> own = host.split(0, host.rank());
  own->set_timeout(options.timeout);
  int version = 0;
  together(*own, label, [&] {
    if (!problem.empty()) throw Error(ErrorKind::kUnavailable, "comm", "NCCL cannot start: " + problem);
    version = nccl_version_number();
  });
  require_agreement(*own, {{"NCCL version", nccl_version_text(version)}}, label);
  std::vector<GpuIdentity> gpus;
  for (const std::string& text : all_gather_text(*own, identity_of(pci).text(), label)) {
    gpus.push_back(GpuIdentity::of_text(text));
  }
  // Each rank checks with its own environment. If one of them refuses, all ranks raise its error.
  together(*own, label, [&] { refuse_shared_gpus(gpus, version); });
  std::unique_ptr<Communicator> headers = own->split(0, own->rank());
  return join_nccl(std::move(own), std::move(headers), options);
}

}  // namespace annulus
