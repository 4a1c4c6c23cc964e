// What a backend implements: CommunicatorBackend carries out the caller's operations (communicator.h) the same way for
// every backend. It checks the arguments, raises an error that has occurred in the meantime, lets the ranks of a
// collective agree on it, and counts; the backend, a class derived from it, only transfers. Used by comm/threads,
// comm/mpi, comm/nccl and comm/c10d. Thread safety: as a Communicator.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/headers.h"
#include "common/error.h"
#include "common/trace/beat.h"

namespace annulus {

// An operation that a backend has started and that is not complete yet. The caller's Work owns it, and destroys it when
// it is complete or has raised an error.
class StartedOperation {
 public:
  virtual ~StartedOperation() = default;
  // Advances it without blocking, and returns true when it is complete. Raises an error if it never will be, also after
  // its deadline.
  virtual bool test() = 0;
  // On a CPU: returns true once it is complete, or raises an error, at the latest at its deadline. On a GPU: orders the
  // current stream after it and returns false; test() may be called afterwards.
  virtual bool wait() = 0;
  // Called in place of wait() while an exception unwinds the stack: makes the communicator dead, unless it is complete.
  virtual void abandon() = 0;
};

class CommunicatorBackend : public Communicator {
 public:
  int rank() const final { return rank_; }
  int size() const final { return size_; }
  int in_job(int rank) const override { return rank; }
  Communicator& host() override { return *this; }
  const RankHosts& hosts() const final { return hosts_; }
  void set_hosts(const std::vector<int>& of) final;
  Seconds timeout() const final { return timeout_; }
  void set_timeout(Seconds timeout) final { timeout_ = timeout; }

  bool lends_to(int peer) const final;
  at::Tensor lendable(at::IntArrayRef sizes, const at::TensorOptions& options) override;
  void set_lending(bool lending) final { lending_ = lending; }

  std::unique_ptr<Work> exchange(const std::vector<Message>& sends, const std::vector<Message>& receives,
                                 OpLabel label) final;
  void all_reduce(at::Tensor& tensor, ReduceOp op, OpLabel label) final;
  void all_gather(at::Tensor& out, const at::Tensor& in, OpLabel label) final;
  void reduce_scatter(at::Tensor& out, const at::Tensor& in, OpLabel label) final;
  void broadcast(at::Tensor& tensor, int root, OpLabel label) final;
  void barrier(OpLabel label) final;
  std::unique_ptr<Work> begin_all_reduce(const at::Tensor& tensor, ReduceOp op, OpLabel label) final;
  std::unique_ptr<Work> begin_all_gather(const at::Tensor& out, const at::Tensor& in, OpLabel label) final;
  std::unique_ptr<Work> begin_reduce_scatter(const at::Tensor& out, const at::Tensor& in, OpLabel label) final;
  int64_t reduce_scatter_holds(int64_t) const override { return 0; }
  std::unique_ptr<Communicator> split(int color, int key, const SplitOptions& options) final;
  int64_t number_call() final { return ++numbered_; }
  const CommStats& stats() const final { return stats_; }

 protected:
  // device: the device on which tensors must be; one without an index stands for every device of its type.
  CommunicatorBackend(int rank, int size, at::Device device)
      : rank_(rank),
        size_(size),
        device_(device),
        hosts_(size),
        sent_to_(static_cast<size_t>(size)),
        received_from_(static_cast<size_t>(size)) {}

  // ---- The transfers. The arguments have been checked. These functions return null if the operation is complete.

  virtual std::unique_ptr<StartedOperation> start_exchange(const std::vector<Message>& sends,
                                                           const std::vector<Message>& receives, OpLabel label) = 0;
  // All ranks have agreed on the call (gather_headers), and the tensor has elements. A barrier consists of the
  // agreement alone.
  virtual std::unique_ptr<StartedOperation> start_all_reduce(at::Tensor& tensor, ReduceOp op, OpLabel label) = 0;
  virtual std::unique_ptr<StartedOperation> start_broadcast(at::Tensor& tensor, int root, OpLabel label) = 0;
  // Begins an all_gather, a reduce_scatter or an all_reduce on which the ranks have not agreed yet: the backend
  // compares their headers as well, in the operation if it can. The tensors may have no elements.
  virtual std::unique_ptr<StartedOperation> begin(const comm_internal::Begun& call) = 0;
  // Whether collectives that are begun add in the order that Communicator::reduce_scatter describes.
  virtual bool adds_in_rank_order() const { return true; }
  // Null if color < 0. The caller sets the timeout, the hosts and the lending of the result. split_options() has its
  // options.
  virtual std::unique_ptr<Communicator> make_split(int color, int key, OpLabel label) = 0;

  // Whether the backend can lend to this rank, wherever it is. Receives without memory are passed to start_exchange()
  // only from ranks for which lends_to() is true.
  virtual bool can_lend_to(int) const { return false; }
  // Whether lendable() made the tensor, or an exchange gave it memory that was lent. Called if can_lend_to() is true.
  virtual bool is_lendable(const at::Tensor&) const { return false; }

  // Returns the header of every rank, in rank order, once all ranks have called it; at the deadline it raises
  // Error(kComm) naming those that have not. `brings` is this rank's input of the collective, undefined if it has none:
  // ranks that share memory may pass it on with the header. By default the headers travel over host(), which must then
  // be a communicator other than this one.
  virtual std::vector<comm_internal::CollectiveHeader> gather_headers(const comm_internal::CollectiveHeader& mine,
                                                                      const at::Tensor& brings, OpLabel label);

  // Called at the start of every operation. Raises an error if the operation is not possible, and calls fail() if this
  // communicator has failed for an outside reason since the last call (a watching thread, another rank).
  virtual void before_operation(OpLabel) {}

  // ---- The dead state. The first reason is kept.

  // Makes this communicator dead. raised: the caller raises the error now. Otherwise the next operation raises it as it
  // is; all later ones raise that the communicator is dead.
  void fail(ErrorKind kind, const std::string& why, bool raised);
  bool failed() const { return failed_; }
  // Raises if this communicator is dead.
  void check_alive(OpLabel label);

  // ---- The time waited, by kind of operation.

  enum class WaitFor { kOther, kExchange, kReduce, kGather };
  static WaitFor wait_for(const comm_internal::Begun& call) {
    return call.reduces() ? WaitFor::kReduce : WaitFor::kGather;
  }
  void add_wait(WaitFor what, Seconds time);
  // The kind of the blocking collective that is being carried out.
  WaitFor blocked_by() const { return blocked_by_; }
  // The options of the split that is being carried out.
  const SplitOptions& split_options() const { return split_options_; }

  // Adds the time from its construction to its destruction.
  class Waiting {
   public:
    Waiting(CommunicatorBackend& comm, WaitFor what)
        : comm_(comm), what_(what), start_(std::chrono::steady_clock::now()) {}
    ~Waiting() { comm_.add_wait(what_, std::chrono::steady_clock::now() - start_); }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    CommunicatorBackend& comm_;
    WaitFor what_;
    std::chrono::steady_clock::time_point start_;
    const RankWait shown_;
  };

  int rank_;
  int size_;
  at::Device device_;
  RankHosts hosts_;
  Seconds timeout_{300};

 private:
  class StartedWork;
  struct Call;
  std::unique_ptr<Work> begin_call(comm_internal::Collective which, ReduceOp op, const at::Tensor& out,
                                   const at::Tensor& in, OpLabel label);
  std::vector<int> hosts_of(const Communicator& split) const;
  void agree(const Call& call);
  void finish(std::unique_ptr<StartedOperation> operation, size_t payload, int sends);
  void count(size_t payload, int sends);
  uint64_t trace_exchange(const std::vector<Message>& sends, const std::vector<Message>& receives, OpLabel label);
  void check(const at::Tensor& tensor, const char* role, OpLabel label) const;

  CommStats stats_;
  int64_t calls_ = 0;  // collectives that this rank has begun, in the headers
  int64_t numbered_ = 0;
  // For traces: a number of this communicator that its ranks share, and how many messages went to each rank and came
  // from it, which number the messages alike on both sides.
  uint64_t traced_as_ = 0;
  std::vector<uint64_t> sent_to_, received_from_;
  WaitFor blocked_by_ = WaitFor::kOther;
  SplitOptions split_options_;
  bool lending_ = true;
  bool failed_ = false;
  bool raised_ = false;  // the reason has been raised
  ErrorKind failed_kind_ = ErrorKind::kComm;
  std::string why_;
};

}  // namespace annulus
