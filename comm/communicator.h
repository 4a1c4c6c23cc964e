// Communicator: how ranks exchange tensors. The attention executor, the trainer and bootstrap call it. The backends are
// in comm/threads (many ranks in one process), comm/mpi (CPU tensors, one process per rank), comm/nccl (CUDA tensors;
// it has never run on a GPU) and comm/c10d (the process groups of a PyTorch program).
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
#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/hosts.h"
#include "common/error.h"

namespace annulus {

using Seconds = std::chrono::duration<double>;

enum class ReduceOp { kSum, kMax, kMin };

// One tensor sent to or received from one peer. A tensor without elements is allowed and moves nothing. A rank may
// exchange messages with itself. Messages of one exchange between the same two ranks match in the order in which both
// sides list them.
//
// A tensor that is received may lack memory (memory/releasable.h). The exchange gives it memory when the message
// arrives: the sender's, if the sender lent it (Communicator::lendable), and otherwise memory of its own.
struct Message {
  at::Tensor tensor;
  int peer = 0;
};

// Says for error messages which operation of the program this is: "attention forward, layer 3", hop 2.
struct OpLabel {
  std::string_view operation;  // must outlive the operation: a literal or a member
  int64_t number = 0;          // 0 for a call that has no number
  // What the number counts: "step" (of training), "hop" (of keys and values around a ring), "batch". A literal.
  std::string_view counted = "call";
};

// Transfers that have been started. The destructor of a Work that was not waited for waits for it, and reports a
// failure without throwing. While an exception unwinds the stack, the destructor abandons the transfers instead: the
// communicator is then dead, and its peers notice at their deadlines (at once on the threads backend). A Work must not
// outlive its communicator.
class Work {
 public:
  virtual ~Work() = default;
  // Moves the transfers along without blocking, and returns true when they are complete. Raises the same errors as the
  // communicator.
  virtual bool test() = 0;
  // On a CPU: blocks until the transfers are complete. On a GPU: orders the current compute stream after them.
  virtual void wait() = 0;
};

// Totals since construction. Metrics read the times, tests all of it. Operations that raised are not counted.
struct CommStats {
  // The messages of this rank's exchanges. A message without elements is not counted.
  int64_t messages_sent = 0;
  int64_t bytes_sent = 0;
  int64_t messages_received = 0;
  int64_t bytes_received = 0;
  int64_t bytes_to_other_hosts = 0;  // the part of bytes_sent that went to ranks of other hosts (Communicator::hosts)
  int64_t bytes_lent = 0;            // the part of bytes_sent that was lent (Communicator::lendable)
  // The number of collectives, barriers and splits included, and the sum of their payloads in bytes. The payload is the
  // tensor that is reduced or broadcast, and the larger tensor of an all_gather and a reduce_scatter (nccl-tests counts
  // in the same way). A collective that was begun is counted when it is found to be complete.
  int64_t collectives = 0;
  int64_t collective_payload = 0;
  // The bytes that each of N ranks sends for these collectives, on average over the ranks, with an algorithm that sends
  // the fewest: (N-1)/N of the payload of an all_gather, a reduce_scatter or a broadcast, twice that for an all_reduce
  // (with N = 4 and a payload of 1,000 bytes: 750, and 1,500). The CPU backends send exactly that for an all_gather and
  // a reduce_scatter (except that between hosts sums of bf16 travel in fp32). For other collectives MPI and NCCL choose
  // the algorithm and do not say which.
  int64_t collective_bytes_sent = 0;
  // The bytes that this rank sent to ranks of other hosts for all_gathers, reduce_scatters and all_reduces on a CPU,
  // without headers. If the ranks of each host are consecutive, all ranks together send (H-1) times the payload over H
  // hosts, and twice that for an all_reduce; where a host has several ranks, sums of bf16 count as fp32. The threads
  // backend, which sends nothing, counts what the other CPU backends would send.
  int64_t collective_bytes_to_other_hosts = 0;
  // Exposed communication in seconds. On a CPU: the time for which the host was blocked in Work::wait() and in blocking
  // collectives. On a GPU: the time for which the current stream was idle in Work::wait() or a collective; it is added
  // by progress() once the device has reached that point. The time that hosts wait for each other is in host().stats().
  double wait_seconds = 0;
  // Parts of wait_seconds, by kind of operation. Barriers, splits and agreement alone are in the total only.
  double exchange_wait_seconds = 0;
  double reduce_wait_seconds = 0;  // all_reduce, reduce_scatter
  double gather_wait_seconds = 0;  // all_gather, broadcast
};

// What a new communicator is for.
struct SplitOptions {
  // The most thread blocks (CTAs) that each of its operations may take from what the device computes; 0: the backend
  // chooses. Only NCCL has such a bound. The same on all ranks.
  int max_ctas = 0;
};

namespace comm_internal {
struct Begun;
struct CollectiveHeader;
enum class Collective : int8_t;
}  // namespace comm_internal

// The public operations are the same for every backend: they check the arguments, raise an error that has occurred in
// the meantime, let the ranks of a collective agree on it, and count. A backend implements the transfer itself, in the
// protected part.
//
// Ownership: code that needs the communicator after the call that it was passed to, such as the autograd node of
// attention until its backward, keeps it alive with shared_from_this(). Its owner must then hold it by std::shared_ptr.
class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  virtual ~Communicator() = default;

  int rank() const { return rank_; }
  int size() const { return size_; }
  virtual std::string_view backend() const = 0;  // "threads", "mpi", "nccl" or "c10d"

  // The number that rank `rank` of this communicator has in the job. Error messages use it.
  virtual int in_job(int rank) const { return rank; }

  // The communicator of the same ranks that carries CPU tensors: this one itself, except on a GPU. Texts and headers
  // are exchanged through it.
  virtual Communicator& host() { return *this; }

  // Which ranks share a host. All are on one host until set_hosts() is called (bootstrap and process groups do that). A
  // split inherits the hosts of its ranks.
  const RankHosts& hosts() const { return hosts_; }
  // of[r] is the host of rank r, under any number. Call it with the same `of` on all ranks, before they communicate.
  // Raises Error(kPlan) if `of` does not have one entry for each rank.
  void set_hosts(const std::vector<int>& of);

  // Deadline of each operation, from its start to its end. Default: 300 s.
  Seconds timeout() const { return timeout_; }
  void set_timeout(Seconds timeout) { timeout_ = timeout; }

  // Starts one grouped, non-blocking exchange of messages. It is not a collective: only the named peers take part.
  // Send buffers must not change and receive buffers must not be read until the Work is complete. The Work raises
  // Error(kMismatch) if a received message has another size or dtype than the posted tensor. Never null.
  std::unique_ptr<Work> exchange(const std::vector<Message>& sends, const std::vector<Message>& receives,
                                 OpLabel label);

  // Lending: ranks of one host may pass a tensor on without copying it. The sender makes it with lendable(), and the
  // receiver posts a tensor without memory; then both use the same memory, which is freed when neither holds it any
  // more. So once a lendable tensor has been sent, it may be freed but must not be changed, except by a rank that
  // received it as the only one and holds it alone. A message counts with all its bytes, lent or copied.
  //
  // Whether this rank and `peer` lend to each other: they are on one host, and the backend can (threads, and MPI where
  // processes may share memory).
  bool lends_to(int peer) const { return lending_ && hosts_.of(peer) == hosts_.of(rank_) && can_lend_to(peer); }
  // A tensor that can be lent, not initialised. A backend that cannot lend returns an ordinary tensor.
  virtual at::Tensor lendable(at::IntArrayRef sizes, const at::TensorOptions& options);
  // Whether ranks lend at all; they do by default. Call it with the same value on all ranks, before they communicate. A
  // split inherits it.
  void set_lending(bool lending) { lending_ = lending; }

  // Collectives. Those that take one tensor work in place. On a CPU they block. The order of additions depends only on
  // size(), hosts() and the tensor's shape, so equal inputs give equal bits. all_reduce takes fp32, fp64 and int64 with
  // each ReduceOp. Once a collective has returned, its tensors may be overwritten (on a GPU: by work that is put on the
  // current stream from then on). On one host the backend chooses the order of an all_reduce; over several hosts all
  // CPU backends use the order of reduce_scatter.
  void all_reduce(at::Tensor& tensor, ReduceOp op, OpLabel label);
  // out: [size, ...in.shape], out[r] is the input of rank r. In place if `in` is out[rank()].
  void all_gather(at::Tensor& out, const at::Tensor& in, OpLabel label);
  // in: [size, ...out.shape]; out is the sum over all ranks of their in[rank()]. In place if `out` is in[rank()]. It
  // takes bf16 as well. CPU backends add in the order of the ranks, rank 0 first; over several hosts they add inside
  // each host first and then host by host (hosts.h). They add bf16 in fp32 and round once. NCCL rounds bf16 at each
  // addition and uses trees and rings of its own.
  void reduce_scatter(at::Tensor& out, const at::Tensor& in, OpLabel label);

  // These begin the same operations and return. The transfer advances in progress() of any communicator of this rank
  // and in waits (on a GPU: on a stream of the communicator). The Work keeps the tensors; `in` must not change and
  // `out` must not be read until it is complete. Several may be under way at once, beside exchanges and blocking ones;
  // all ranks begin and call the collectives of a communicator in the same order. The agreement of the ranks does not
  // block either (except over a process group on a GPU, comm/c10d/c10d_communicator.h): if they differ, Work::test()
  // and wait() raise Error(kMismatch) on every rank. (On a GPU the transfer is then aborted, the communicator is dead,
  // and the next operation may be the one that raises.) The deadline runs from the call (on a GPU that of the agreement
  // does; that of the transfer runs from when the device reaches it). `label.operation` must outlive the Work. Never
  // null.
  std::unique_ptr<Work> begin_all_gather(const at::Tensor& out, const at::Tensor& in, OpLabel label);
  std::unique_ptr<Work> begin_reduce_scatter(const at::Tensor& out, const at::Tensor& in, OpLabel label);
  // CPU backends add in the order of reduce_scatter, on one host as well.
  std::unique_ptr<Work> begin_all_reduce(const at::Tensor& tensor, ReduceOp op, OpLabel label);
  // The bytes of host memory that a reduce_scatter whose `in` has `payload` bytes takes besides its tensors until it is
  // complete. A begun all_reduce of as many bytes takes the same. For bf16 over several hosts, where sums are fp32, the
  // operation takes more, but less than twice that.
  virtual int64_t reduce_scatter_holds(int64_t payload) const {
    (void)payload;
    return 0;
  }

  // The number of a call among those of this communicator that have one: 1, 2, ... Only calls that will have a backward
  // need one (backward_term in comm/agreement.h). Ask for it once the ranks have agreed on the call, which they do all
  // together or not at all: then a number names one call, in which all of them took part. Calls agreed on ahead
  // (attention/execution/agreed_calls.h) have numbers that nothing compares.
  int64_t number_call() { return ++numbered_; }

  void broadcast(at::Tensor& tensor, int root, OpLabel label);
  void barrier(OpLabel label);

  // Returns a communicator of the ranks that gave the same color, ordered by (key, rank). Collective. A rank with
  // color < 0 joins none and gets null.
  std::unique_ptr<Communicator> split(int color, int key, const SplitOptions& options = {});

  // Moves pending transfers along without blocking. It is cheap: the executor calls it between pieces of work of a few
  // milliseconds.
  virtual void progress() = 0;

  const CommStats& stats() const { return stats_; }

 protected:
  // device: the device on which tensors must be; one without an index stands for every device of its type.
  Communicator(int rank, int size, at::Device device) : rank_(rank), size_(size), device_(device), hosts_(size) {}

  // ---- What a backend implements. The arguments have been checked. A start_ function returns null if the transfer is
  // complete when it returns, and otherwise a Work.

  virtual std::unique_ptr<Work> start_exchange(const std::vector<Message>& sends, const std::vector<Message>& receives,
                                               OpLabel label) = 0;
  // Whether the backend can lend to this rank, wherever it is. Receives without memory are passed to start_exchange()
  // only from ranks for which lends_to() is true.
  virtual bool can_lend_to(int peer) const {
    (void)peer;
    return false;
  }
  // Whether lendable() made the tensor, or an exchange gave it memory that was lent. Called if can_lend_to() is true.
  virtual bool is_lendable(const at::Tensor& tensor) const {
    (void)tensor;
    return false;
  }
  // All ranks have agreed on the call (gather_headers), and the tensor has elements. A barrier consists of the
  // agreement alone.
  virtual std::unique_ptr<Work> start_all_reduce(at::Tensor& tensor, ReduceOp op, OpLabel label) = 0;
  virtual std::unique_ptr<Work> start_broadcast(at::Tensor& tensor, int root, OpLabel label) = 0;
  // Begins an all_gather, a reduce_scatter or an all_reduce on which the ranks have not agreed yet: the backend
  // compares their headers as well, in the Work if it can. The tensors may have no elements. Never null.
  virtual std::unique_ptr<Work> begin(const comm_internal::Begun& call) = 0;
  // Whether collectives that are begun add in the order that reduce_scatter() describes.
  virtual bool adds_in_rank_order() const { return true; }
  // split() itself sets the timeout and the hosts of the result. split_options() says what it is for.
  virtual std::unique_ptr<Communicator> make_split(int color, int key, OpLabel label) = 0;

  // Returns the header of every rank, in rank order, once all ranks have called it; at the deadline it raises
  // Error(kComm) naming those that have not. `brings` is this rank's input of the collective, undefined if it has none:
  // ranks that share memory may pass it on with the header. By default the headers travel over host(), which must then
  // be a communicator other than this one.
  virtual std::vector<comm_internal::CollectiveHeader> gather_headers(const comm_internal::CollectiveHeader& mine,
                                                                      const at::Tensor& brings, OpLabel label);

  // Called at the start of every operation. Raises an error if the operation is not possible, and calls fail() if this
  // communicator has failed for an outside reason since the last call (a watching thread, another rank).
  virtual void look(OpLabel) {}

  // ---- The dead state. The first reason is kept.

  // Makes this communicator dead. told: the caller raises the error now. Otherwise the next operation raises it as it
  // is; all later ones raise that the communicator is dead.
  void fail(ErrorKind kind, const std::string& why, bool told);
  bool failed() const { return failed_; }
  // Raises if this communicator is dead.
  void check_alive(OpLabel label);

  // ---- The time waited, by kind of operation.

  enum class WaitFor { kOther, kExchange, kReduce, kGather };
  void add_wait(WaitFor what, Seconds time);
  // The kind of the blocking collective that is being carried out.
  WaitFor blocked_by() const { return blocked_by_; }
  // The options of the split that is being carried out.
  const SplitOptions& split_options() const { return split_options_; }

  // Adds the time from its construction to its destruction.
  class Waiting {
   public:
    Waiting(Communicator& comm, WaitFor what) : comm_(comm), what_(what), start_(std::chrono::steady_clock::now()) {}
    ~Waiting() { comm_.add_wait(what_, std::chrono::steady_clock::now() - start_); }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    Communicator& comm_;
    WaitFor what_;
    std::chrono::steady_clock::time_point start_;
  };

  int rank_;
  int size_;
  at::Device device_;
  RankHosts hosts_;
  Seconds timeout_{300};

 private:
  struct Call;
  class Counted;
  std::unique_ptr<Work> begin_call(comm_internal::Collective which, ReduceOp op, const at::Tensor& out,
                                   const at::Tensor& in, OpLabel label);
  RankHosts hosts_of(const Communicator& split) const;
  void agree(const Call& call);
  void finish(std::unique_ptr<Work> work, size_t payload, int sends);
  void count(size_t payload, int sends);
  void check(const at::Tensor& tensor, const char* role, OpLabel label) const;

  CommStats stats_;
  int64_t calls_ = 0;  // collectives that this rank has begun, in the headers
  int64_t numbered_ = 0;
  WaitFor blocked_by_ = WaitFor::kOther;
  SplitOptions split_options_;
  bool lending_ = true;
  bool failed_ = false;
  bool told_ = false;
  ErrorKind failed_kind_ = ErrorKind::kComm;
  std::string why_;
};

// Gathers one text of every rank, of any length, in rank order. Collective, over host(). Raises as all_gather does.
std::vector<std::string> all_gather_text(Communicator& comm, std::string_view text, OpLabel label);

}  // namespace annulus
