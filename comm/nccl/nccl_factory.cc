// Checks the requirements of a communicator over NCCL and makes it: see nccl_communicator.h.
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <unistd.h>

#include <cstdlib>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/agreement.h"
#include "comm/nccl/nccl_communicator.h"
#include "comm/nccl/nccl_handle.h"
#include "comm/nccl/nccl_internal.h"

namespace annulus {

using namespace nccl_internal;

namespace {

// Whether NCCL allows several ranks on one GPU. The older way, NCCL_HOSTID, is not checked here: it is part of the
// identities that refuse_shared_gpus() compares.
bool several_ranks_a_gpu(int version) {
  const char* enabled = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return version >= NCCL_VERSION(2, 30, 0) && enabled != nullptr && std::string_view(enabled) == "1";
}

void refuse_shared_gpus(const std::vector<std::string>& identities, int version) {
  if (several_ranks_a_gpu(version)) return;
  for (size_t r = 0; r < identities.size(); ++r) {
    for (size_t other = 0; other < r; ++other) {
      if (identities[r].empty() || identities[r] != identities[other]) continue;
      throw Error(ErrorKind::kPlan, "comm",
                  "ranks " + std::to_string(other) + " and " + std::to_string(r) + " use the same GPU (" +
                      identities[r] + "): NCCL " + nccl_version_text(version) +
                      " allows one rank per GPU; start as many ranks as there are GPUs. To try several ranks on one "
                      "GPU: from NCCL 2.30 on set NCCL_MULTI_RANK_GPU_ENABLE=1, before that start each rank as a "
                      "process with a different NCCL_HOSTID");
    }
  }
}

}  // namespace

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

std::unique_ptr<Communicator> make_nccl_communicator(Communicator& host, const NcclOptions& options) {
  const OpLabel label{"starting NCCL", 0};
  std::string problem = nccl_unavailable();
  std::string identity;
  if (problem.empty()) {
    int devices = 0;
    cudaGetDeviceCount(&devices);
    char bus[32] = {};
    if (options.device < 0 || options.device >= devices) {
      problem = "no CUDA device " + std::to_string(options.device) + ": this host has " + std::to_string(devices);
    } else if (cudaDeviceGetPCIBusId(bus, sizeof bus, options.device) == cudaSuccess) {
      // If their NCCL_HOSTID differ, NCCL treats processes of one host as processes of different hosts.
      const char* host_id = std::getenv("NCCL_HOSTID");
      char name[256] = {};
      gethostname(name, sizeof name - 1);
      identity = std::string(name) + " " + bus + (host_id != nullptr ? std::string(" ") + host_id : "");
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
  const std::vector<std::string> identities = all_gather_text(*own, identity, label);
  // Each rank checks with its own environment. If one of them refuses, all ranks raise its error.
  together(*own, label, [&] { refuse_shared_gpus(identities, version); });
  std::unique_ptr<Communicator> headers = own->split(0, own->rank());
  return join_nccl(std::move(own), std::move(headers), options);
}

}  // namespace annulus
