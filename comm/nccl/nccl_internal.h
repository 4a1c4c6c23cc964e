// Shared by the communicator over NCCL and its factory. Only in CUDA builds.
#pragma once

#include <memory>

#include "comm/nccl/nccl_communicator.h"

namespace annulus::nccl_internal {

// host and headers: over the same ranks, owned. Collective. Checks nothing; make_nccl_communicator does.
std::unique_ptr<Communicator> join_nccl(std::unique_ptr<Communicator> host, std::unique_ptr<Communicator> headers,
                                        const NcclOptions& options);

}  // namespace annulus::nccl_internal
