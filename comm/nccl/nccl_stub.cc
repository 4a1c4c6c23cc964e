// The stub of the NCCL backend, for builds without CUDA.
#include "comm/nccl/nccl_communicator.h"
#include "common/error.h"

namespace annulus {

std::string nccl_unavailable() {
  return "this build has no NCCL: build with ANNULUS_CUDA=1 (it needs the CUDA toolkit and a LibTorch for CUDA), or "
         "use "
         "device = \"cpu\"";
}

std::string nccl_version() { return ""; }

std::string nccl_version_built() { return ""; }

std::string nccl_sharing_remedy() { return ""; }

std::unique_ptr<Communicator> make_nccl_communicator(Communicator&, const NcclOptions&) {
  throw Error(ErrorKind::kUnavailable, "comm", nccl_unavailable());
}

}  // namespace annulus
