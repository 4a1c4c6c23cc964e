// The threads backend: many ranks in one process. Each rank is a thread with a Communicator over shared memory. Used by
// unit tests (of annulus and of its users), by benchmarks, and with one rank by jobs that need no communication.
//
// Carries CPU tensors of any dtype. Reductions are made in rank order, so equal inputs give equal bits. Ranks that
// share another device exchange its tensors, too (it has never been run on a GPU).
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace annulus {

// Decides in which order ranks go on, so that a run of them can be repeated (comm/testing/orders.h). One rank runs at a
// time: what it does between two calls of its communicator is one piece.
class RankOrder {
 public:
  virtual ~RankOrder() = default;
  // Returns the rank that goes on, one of `ready`: the ranks, ascending, that are not blocked and have not ended.
  // Called when `rank` comes to a call `at` ("ring, hop 3"); with an empty `at` when it has to wait, has looked in vain
  // (test(), progress()) or has ended, so that another rank should go on if one can; first with rank -1. The calls are
  // made one after the other, on the threads of the ranks. It must not throw.
  virtual int next(int rank, const std::vector<int>& ready, const std::string& at) = 0;
};

// Runs `body` once for each of n ranks, on a thread of its own, and returns when all have returned. In each of these
// threads LibTorch computes with one thread, and grad mode and the other thread-local settings of LibTorch are those of
// the caller (a new thread would not inherit them). The caller's number of threads is restored at the end.
//
// If a rank throws, the waits of the other ranks fail at once with Error(kComm) naming that rank, and run_ranks
// rethrows the error of the rank that failed first. A rank that waits for one that has already returned also fails at
// once. If all ranks wait, the wait with the earliest deadline fails at once, and its error says who waits for whom;
// each rank must therefore communicate from a single thread. Raises Error(kPlan) if n < 1. A Communicator that is kept
// alive beyond `body` has no peers any more.
//
// device: where the tensors are that the ranks exchange. On a device other than the CPU, all ranks must leave the
// current stream as it is, because a receiver relies on its order; collectives of such tensors and splits are refused
// with Error(kPlan), and host() carries CPU tensors.
//
// order: chooses which rank goes on; by default the system does. Waits then miss their deadline only if all ranks wait.
void run_ranks(int n, const std::function<void(Communicator&)>& body, at::Device device = at::kCPU,
               RankOrder* order = nullptr);

// A communicator of one rank. It needs no launcher, no MPI and no threads. It may exchange messages with itself.
std::shared_ptr<Communicator> make_self_communicator();

}  // namespace annulus
