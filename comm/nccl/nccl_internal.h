// Shared by the NCCL communicator (nccl_communicator.cc) and its factory (nccl_factory.cc). Only in CUDA builds.
#pragma once

#include <memory>

#include "comm/nccl/nccl_communicator.h"

namespace annulus::nccl_internal {

// Makes the communicator of the ranks of `host` and `headers`, which must have the same ranks, and owns both. It checks
// no options, as make_nccl_communicator has done that. Collective.
std::unique_ptr<Communicator> join_nccl(std::unique_ptr<Communicator> host, std::unique_ptr<Communicator> headers,
                                        const NcclOptions& options);

}  // namespace annulus::nccl_internal
