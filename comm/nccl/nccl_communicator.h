// The NCCL backend: CUDA tensors, one rank per GPU. It is built with --config=cuda; other builds have a stub that
// raises Error(kUnavailable). Used by launcher/device.cc; `doctor` and the reports of hosts show the versions. It has
// never run on a GPU.
#pragma once

#include <memory>
#include <string>

#include "comm/communicator.h"

namespace annulus {

// Why this build or machine cannot use NCCL ("this build has no NCCL: ...", "no CUDA device: ..."); empty if it can.
std::string nccl_unavailable();

// The version of the NCCL library that was loaded, "2.28.9"; empty in a build without NCCL.
std::string nccl_version();

// The version of the NCCL headers that this program was compiled with; empty in a build without NCCL.
std::string nccl_version_built();

// What would let several ranks of this host use one GPU, which only tries need ("set NCCL_MULTI_RANK_GPU_ENABLE=1").
// Empty if this process's environment has it already, and in a build without NCCL.
std::string nccl_sharing_remedy();

struct NcclOptions {
  int device = 0;       // CUDA ordinal of this rank
  Seconds timeout{60};  // deadline of making the communicator
  int max_ctas = 0;     // as in SplitOptions, 0 to 64
};

// Makes a communicator over the ranks of `host` (MPI, or threads in one process), for tensors on the given device.
// Collective. NCCL's unique id travels over `host`. The result does not keep `host`, but two communicators split off
// it.
//
// - Transfers run on a high-priority stream of the communicator, after the work that is on the current stream at the
//   call. Work::wait() and the collectives order the current stream after them and do not block the host. Buffers are
//   not returned to the allocator before the device is done with them or the current stream is ordered after them.
//   Tensors that were allocated on a stream other than the current one must be recorded with the allocator, as for any
//   use of a tensor on another stream.
// - Before an all_reduce and a broadcast the ranks agree over `host`, so that ranks that differ all raise
//   Error(kMismatch). While an exchange runs, the sizes and dtypes of its messages are compared over `host`; while an
//   all_gather, a reduce_scatter or a begun all_reduce runs, so is everything that the ranks must agree on. A mismatch
//   aborts the transfer, and this communicator is dead.
// - barrier() is a barrier of the hosts: it does not wait for the device.
// - A thread watches deadlines and NCCL's asynchronous errors. After a missed deadline or an error it calls
//   ncclCommAbort, which ends the kernels that wait, and the next call of this communicator raises an error that names
//   the operation, the hop and the peer.
//   A failure of the device, which CUDA reports in whatever call comes next, also becomes an error that names the rank
//   and the operation.
// - The deadline of a transfer runs from when the device reaches it, not from the call, because the host may be far
//   ahead. The deadline of the comparison over `host` runs from the call: if the host of a rank is further behind than
//   the deadline, the transfer fails.
// - After reading a result from the device, call progress(): it raises if a transfer before that result was aborted.
// - The first exchange with a peer connects to it. It may block the host until that peer makes the same exchange, up to
//   the deadline.
// - While the current stream is captured into a CUDA graph, every operation raises Error(kPlan). progress() and
//   Work::test() then only report what the watching thread has found, because a query of the device would invalidate
//   the graph.
//
// Raises Error(kUnavailable) if nccl_unavailable() gives a reason; Error(kPlan) if two ranks name the same GPU and NCCL
// has not been told to allow it (shared_gpus.h); Error(kMismatch) if the ranks load different versions of NCCL;
// Error(kComm) if a rank does not come.
std::unique_ptr<Communicator> make_nccl_communicator(Communicator& host, const NcclOptions& options);

}  // namespace annulus
