// Many ranks in one process: each rank is a thread with a Communicator over shared memory. For unit tests (ours and
// those of users) and, with one rank, for jobs that need no communication at all.
//
// Carries CPU tensors of any dtype. Sums are made in rank order, so equal inputs give equal bits.
#pragma once

#include <functional>
#include <memory>

#include "comm/communicator.h"

namespace annulus {

// Runs body once per rank, each on a thread of its own, and returns when all have returned. In each thread LibTorch
// computes with one thread, and grad mode and the other thread-local settings of LibTorch are those of the caller
// (they are not inherited by themselves); the caller's number of threads is restored at the end.
//
// When a rank throws, the others' waits fail at once with Error(kComm) naming that rank, and run_ranks rethrows the
// error of the rank that failed first. A rank that waits for one that has already returned fails at once, too, and when
// all ranks wait, the wait whose deadline is first fails at once: so each rank must communicate from one thread.
// n < 1 is Error(kPlan). What keeps a share of body's Communicator for longer finds no peer there any more.
void run_ranks(int n, const std::function<void(Communicator&)>& body);

// A communicator of one rank that needs no launcher, no MPI and no threads. It may exchange with itself.
std::shared_ptr<Communicator> make_self_communicator();

}  // namespace annulus
