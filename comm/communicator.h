// Communicator: how ranks exchange tensors. The attention executor, the trainer and bootstrap call it. The backends are
// in comm/threads (many ranks in one process), comm/mpi (CPU tensors, one process per rank), comm/nccl (CUDA tensors;
// it has never run on a GPU) and comm/c10d (the process groups of a PyTorch program); communicator_backend.h is what
// they implement.
//
// The contract is the same for every backend:
// - Every rank of a communicator calls the same operations in the same order.
// - Every wait has a deadline (`timeout`). A failure raises Error(kComm) naming the operation and the peer. After that
//   the communicator is dead: every later call raises at once, and buffers handed to it are neither freed nor reused.
// - If the ranks of a collective differ in its operation, shape or dtype, Error(kMismatch) is raised on every rank; it
//   names the ranks that differ and what differs. Nothing hangs.
// - Tensors must be contiguous, and on a device and of a dtype that the backend supports; anything else is refused with
//   Error(kPlan) before anything is sent.
// - Thread safety: a communicator and its Works are used by one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/comm_stats.h"
#include "comm/hosts.h"
#include "comm/lending.h"
#include "common/error.h"  // the errors that it raises

namespace annulus {

using Seconds = std::chrono::duration<double>;

enum class ReduceOp { kSum, kMax, kMin };

// One tensor sent to or received from one peer, which may be this rank itself. A tensor without elements moves nothing.
// Messages of one exchange between the same two ranks match in the order in which both sides list them. A received
// tensor may lack memory (memory/releasable.h): when the message arrives, it gets the sender's, if that is lent
// (lending.h), and otherwise its own.
struct Message {
  at::Tensor tensor;
  int peer = 0;
};

// Names an operation of the program in error messages: "attention forward, layer 3", hop 2.
struct OpLabel {
  std::string_view operation;  // must outlive the operation: a literal or a member
  int64_t number = 0;          // 0 for a call that has no number
  // What the number counts: "step" (of training), "hop" (of keys and values around a ring), "batch". A literal.
  std::string_view counted = "call";
};

// An operation that has been started. The destructor of a Work that was not waited for waits for it, and logs a failure
// without throwing. While an exception unwinds the stack, the destructor abandons the operation instead: the
// communicator is then dead, and its peers notice at their deadlines (at once on the threads backend). A Work must not
// outlive its communicator.
class Work {
 public:
  virtual ~Work() = default;
  // Advances the operation without blocking, and returns true when it is complete. Raises the same errors as the
  // communicator.
  virtual bool test() = 0;
  // On a CPU: blocks until the operation is complete. On a GPU: orders the current compute stream after it.
  virtual void wait() = 0;
};

// What a new communicator is for.
struct SplitOptions {
  // The most thread blocks (CTAs) that each of its operations may take from what the device computes; 0: the backend
  // chooses. Only NCCL has such a bound. The same on all ranks.
  int max_ctas = 0;
};

// Code that needs the communicator after the call that it was passed to, such as the autograd node of attention until
// its backward, keeps it alive with shared_from_this(). Its owner must then hold it by std::shared_ptr.
class Communicator : public Lending, public std::enable_shared_from_this<Communicator> {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string_view backend() const = 0;  // "threads", "mpi", "nccl" or "c10d"
  // The number that rank `rank` of this communicator has in the job. Error messages use it.
  virtual int in_job(int rank) const = 0;
  // The communicator of the same ranks that carries CPU tensors: this one itself, except on a GPU. Texts and headers
  // are exchanged through it.
  virtual Communicator& host() = 0;

  // Which ranks share a host. All are on one host until set_hosts() is called (bootstrap and process groups do that). A
  // split inherits the hosts of its ranks.
  virtual const RankHosts& hosts() const = 0;
  // of[r] is the host of rank r, under any number. Call it with the same `of` on all ranks, before they communicate.
  // Raises Error(kPlan) if `of` does not have one entry for each rank.
  virtual void set_hosts(const std::vector<int>& of) = 0;

  // Deadline of each operation, from its start to its end. Default: 300 s.
  virtual Seconds timeout() const = 0;
  virtual void set_timeout(Seconds timeout) = 0;

  // Starts one grouped, non-blocking exchange of messages, in which only the named peers take part. Send buffers must
  // not change and receive buffers must not be read until the Work is complete. The Work raises Error(kMismatch) if a
  // received message has another size or dtype than the tensor for it. Never null.
  virtual std::unique_ptr<Work> exchange(const std::vector<Message>& sends, const std::vector<Message>& receives,
                                         OpLabel label) = 0;

  // ---- Collectives. They block on a CPU. Once one has returned, its tensors may be overwritten (on a GPU: by work
  // that is put on the current stream from then on). The order of additions depends only on size(), hosts() and the
  // tensor's shape, so equal inputs give equal bits.

  // In place; fp32, fp64 or int64. On one host the backend chooses the order of additions, over several hosts all CPU
  // backends use that of reduce_scatter.
  virtual void all_reduce(at::Tensor& tensor, ReduceOp op, OpLabel label) = 0;
  // out: [size, ...in.shape], out[r] is the input of rank r. In place if `in` is out[rank()].
  virtual void all_gather(at::Tensor& out, const at::Tensor& in, OpLabel label) = 0;
  // in: [size, ...out.shape], fp32, fp64, int64 or bf16; out is the sum over all ranks of their in[rank()]. In place if
  // `out` is in[rank()]. CPU backends add in the order of the ranks, rank 0 first, over several hosts inside each host
  // first and then host by host (hosts.h); they add bf16 in fp32 and round once. NCCL rounds bf16 at each addition and
  // uses trees and rings of its own.
  virtual void reduce_scatter(at::Tensor& out, const at::Tensor& in, OpLabel label) = 0;
  // On every rank `tensor` becomes that of rank `root`; the same shape and dtype on all.
  virtual void broadcast(at::Tensor& tensor, int root, OpLabel label) = 0;
  // Returns once every rank has called it. It does not wait for a device.
  virtual void barrier(OpLabel label) = 0;

  // ---- The same collectives, begun and not waited for. Several may be under way at once, beside exchanges and
  // blocking ones. They advance in progress() of any communicator of this rank and in waits (on a GPU: on a stream of
  // the communicator). The Work keeps the tensors; `in` must not change and `out` must not be read until it is
  // complete. `label.operation` must outlive the Work. If the ranks differ, Work::test() and wait() raise
  // Error(kMismatch). (On a GPU the transfer is then aborted, the communicator is dead, and the next operation may be
  // the one that raises; over a process group on a GPU the call itself waits for the agreement,
  // comm/c10d/c10d_communicator.h.) The deadline runs from the call; on a GPU that of the transfer runs from when the
  // device reaches it. Never null.

  // CPU backends add in the order of reduce_scatter, on one host as well.
  virtual std::unique_ptr<Work> begin_all_reduce(const at::Tensor& tensor, ReduceOp op, OpLabel label) = 0;
  virtual std::unique_ptr<Work> begin_all_gather(const at::Tensor& out, const at::Tensor& in, OpLabel label) = 0;
  virtual std::unique_ptr<Work> begin_reduce_scatter(const at::Tensor& out, const at::Tensor& in, OpLabel label) = 0;
  // The bytes of the CPU's memory that a reduce_scatter whose `in` has `payload` bytes takes besides its tensors until
  // it is complete, and so does a begun all_reduce of as many bytes. bf16 over several hosts, where sums are fp32,
  // takes more, but less than twice that.
  virtual int64_t reduce_scatter_holds(int64_t payload) const = 0;

  // Returns a communicator of the ranks that gave the same color, ordered by (key, rank). Collective. A rank with
  // color < 0 joins none and gets null.
  virtual std::unique_ptr<Communicator> split(int color, int key, const SplitOptions& options = {}) = 0;

  // The number of a call among those of this communicator that have one: 1, 2, ... Only calls that will have a backward
  // need one (backward_term in comm/agreement.h). Ask for it once the ranks have agreed on the call, which they do all
  // together or not at all: then a number names one call, in which all of them took part. Calls agreed on ahead
  // (attention/execution/planned_call.h) have numbers that nothing compares.
  virtual int64_t number_call() = 0;

  // Advances what is under way without blocking. It is cheap: the executor calls it between pieces of work of a few
  // milliseconds.
  virtual void progress() = 0;

  virtual const CommStats& stats() const = 0;
};

// Gathers one text of every rank, of any length, in rank order. Collective, over host(). Raises as all_gather does.
std::vector<std::string> all_gather_text(Communicator& comm, std::string_view text, OpLabel label);

}  // namespace annulus
