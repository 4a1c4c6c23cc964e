// The threads backend: many ranks in one process. Each rank is a thread with a Communicator over shared memory. Used by
// unit tests (of annulus and of its users), by benchmarks, and with one rank by jobs that need no communication.
//
// Carries CPU tensors of any dtype. Reductions are made in rank order, so equal inputs give equal bits. Ranks that
// share another device exchange its tensors, too (it has never been run on a GPU).
#pragma once

#include <functional>
#include <memory>

#include "comm/communicator.h"

namespace annulus {

// Runs `body` once for each of n ranks, on a thread of its own, and returns when all have returned. In each of these
// threads LibTorch computes with one thread, and grad mode and the other thread-local settings of LibTorch are those of
// the caller (a new thread would not inherit them). The caller's number of threads is restored at the end.
//
// If a rank throws, the waits of the other ranks fail at once with Error(kComm) naming that rank, and run_ranks
// rethrows the error of the rank that failed first. A rank that waits for one that has already returned also fails at
// once. If all ranks wait, the wait with the earliest deadline fails at once; each rank must therefore communicate from
// a single thread. Raises Error(kPlan) if n < 1. A Communicator that is kept alive beyond `body` has no peers any more.
//
// device: where the tensors are that the ranks exchange. On a device other than the CPU, all ranks must leave the
// current stream as it is, because a receiver relies on its order; collectives of such tensors and splits are refused
// with Error(kPlan), and host() carries CPU tensors.
void run_ranks(int n, const std::function<void(Communicator&)>& body, at::Device device = at::kCPU);

// A communicator of one rank. It needs no launcher, no MPI and no threads. It may exchange messages with itself.
std::shared_ptr<Communicator> make_self_communicator();

}  // namespace annulus
