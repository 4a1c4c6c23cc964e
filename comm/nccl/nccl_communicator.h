// The NCCL backend: CUDA tensors, one rank a GPU. Built with --config=cuda; elsewhere a stub that says so.
#pragma once

#include <memory>
#include <string>

#include "comm/communicator.h"

namespace annulus {

// Why this build or machine cannot use NCCL ("this build has no NCCL: ...", "no CUDA device: ..."); empty when it can.
std::string nccl_unavailable();

// The version that was loaded, "2.28.9"; empty in a build without NCCL.
std::string nccl_version();

// The version whose headers this program was compiled with; empty in a build without NCCL.
std::string nccl_version_built();

struct NcclOptions {
  int device = 0;       // CUDA ordinal of this rank
  Seconds timeout{60};  // deadline of making the communicator
};

// A communicator over the ranks of host (MPI, or threads in one process), for tensors on the given device. Collective.
// The unique id travels over host; host is not kept, two communicators split off it are.
//
// - Transfers run on a high-priority stream of their own, after what the current stream holds at the call; Work::wait()
//   and the collectives order the current stream after them and do not block the host. Buffers are kept from the
//   allocator until the device is done with them or the current stream is ordered after them. Tensors taken on another
//   stream than the current one must be recorded with the allocator, as for any use of a tensor on another stream.
// - all_reduce and broadcast are preceded by a small agreement over host, so that ranks that disagree all raise
//   Error(kMismatch). Of exchanges the sizes and dtypes, of all_gather and reduce_scatter all that ranks must agree on
//   are compared over host while they run; a mismatch aborts them, and this communicator is dead.
// - barrier() is one of hosts: it does not wait for the device.
// - A thread watches deadlines and NCCL's asynchronous errors. When one strikes it calls ncclCommAbort, which ends the
//   kernels that wait, and the next call of this communicator raises the error that names operation, hop and peer.
// - The deadline of a transfer runs from when the device gets to it, not from the call: the host may be far ahead. That
//   of the comparison that hosts make meanwhile runs from the call: a rank whose host is further behind
//   than the deadline ends the transfer.
//   After having read a result of the device, call progress(): it raises if a transfer on the way there was aborted.
// - The first exchange with a peer connects to it and may block the host until that peer makes the same exchange, for
//   as long as the deadline.
// - While the current stream is captured into a CUDA graph every operation raises Error(kPlan); progress() and
//   Work::test() then tell only what the watching thread has found, since a look at the device would spoil the graph.
//
// Errors: kUnavailable where nccl_unavailable() says so; kPlan when two ranks name the same GPU and NCCL has not been
// told to allow it (NCCL_MULTI_RANK_GPU_ENABLE=1 from NCCL 2.30 on, before that an NCCL_HOSTID for each process);
// kMismatch when the ranks load different versions of NCCL; kComm when a rank does not come.
std::unique_ptr<Communicator> make_nccl_communicator(Communicator& host, const NcclOptions& options);

}  // namespace annulus
