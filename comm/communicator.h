// Communicator: how ranks exchange tensors. The executor, the trainer and bootstrap call it; backends live in
// comm/threads (many ranks in one process), comm/mpi (CPU tensors, one process a rank) and comm/nccl (CUDA tensors).
//
// Contract, the same for every backend:
// - Every rank of a communicator calls the same operations in the same order.
// - Every wait has a deadline (`timeout`). What fails raises Error(kComm) naming operation and peer. After that
//   the communicator is dead: every later call raises at once, and buffers handed to it are neither freed nor reused.
// - What all ranks can see to be wrong together (shape, dtype, operation of a collective) raises Error(kMismatch) on
//   every rank, naming the ranks that differ and in what. Nothing hangs.
// - Tensors must be contiguous and on a device and of a dtype that the backend supports; anything else is refused with
//   Error(kPlan) before anything is sent.
// - Thread safety: a communicator belongs to one thread at a time; so do its Works.
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

// One tensor to or from one peer. A zero-element tensor is allowed and moves nothing. A rank may exchange with itself.
// Messages of one exchange between the same two ranks match in the order in which both sides list them.
struct Message {
  at::Tensor tensor;
  int peer = 0;
};

// Where an operation stands in the program, for error messages: "attention forward, layer 3", hop 2.
struct OpLabel {
  std::string_view operation;  // must outlive the operation: a literal or a member
  int64_t number = 0;          // a call that has no number has 0
  // What the number counts: "step" (of training), "hop" (of what travels), "batch". A literal.
  std::string_view counted = "call";
};

// Started transfers. Destroying a Work that was not waited for waits for it (and reports, without throwing, a failure);
// while an exception unwinds the stack it is abandoned instead: the communicator is dead then, its peers find out by
// their deadlines (at once on the threads backend). A Work may not outlive its communicator.
class Work {
 public:
  virtual ~Work() = default;
  // Makes progress; true when the transfers are complete. Raises as the communicator does.
  virtual bool test() = 0;
  // On a CPU: blocks until complete. On a GPU: orders the current compute stream after the transfers.
  virtual void wait() = 0;
};

// Totals since construction: what metrics (the time waited) and tests read. Operations that raised are not counted.
struct CommStats {
  // Exchanges: what this rank's messages hold. A message without elements is not counted.
  int64_t messages_sent = 0;
  int64_t bytes_sent = 0;
  int64_t messages_received = 0;
  int64_t bytes_received = 0;
  int64_t bytes_to_other_hosts = 0;  // of bytes_sent: to ranks of other hosts (Communicator::hosts)
  // Collectives, barriers and splits included, and the sum of their sizes in bytes: of the tensor that is reduced or
  // broadcast, of all ranks' inputs together for all_gather and reduce_scatter (nccl-tests counts so, too). What is
  // begun is counted when it is found complete.
  int64_t collectives = 0;
  int64_t collective_payload = 0;
  // What an algorithm that is optimal in bytes makes each of N ranks send for these collectives, on average over the
  // ranks: (N-1)/N of the payload of an all_gather, a reduce_scatter and a broadcast, twice that of an all_reduce. The
  // CPU backends send exactly that for an all_gather and a reduce_scatter (but between hosts sums of bf16 travel in
  // fp32); otherwise the algorithm is the library's affair, which MPI and NCCL do not tell.
  int64_t collective_bytes_sent = 0;
  // What this rank sent to ranks of other hosts for all_gathers, reduce_scatters and all_reduces on a CPU; headers do
  // not count. All ranks together: (H-1) times the payload over H hosts, twice that of an all_reduce, where the ranks
  // of a host are neighbours (for sums of bf16 as many bytes as for fp32 where a host has several ranks). The threads
  // backend, which sends nothing, counts what the others send.
  int64_t collective_bytes_to_other_hosts = 0;
  // Exposed communication. On a CPU: the time that the host spent blocked, in Work::wait() and in blocking collectives.
  // On a GPU: the time that the current stream stood still in Work::wait() or a collective, known once the device has
  // got that far and progress() has looked; what hosts wait for each other is in host().stats().
  double wait_seconds = 0;
  // Of these: by what was waited for. Barriers, splits and agreement alone are in the total only.
  double exchange_wait_seconds = 0;
  double reduce_wait_seconds = 0;  // all_reduce, reduce_scatter
  double gather_wait_seconds = 0;  // all_gather, broadcast
};

namespace comm_internal {
struct Begun;
struct CollectiveHeader;
enum class Collective : int8_t;
}  // namespace comm_internal

// The public operations are the same for every backend: they check the arguments, raise what has struck the
// communicator meanwhile, let the ranks of a collective agree on it, and count. A backend implements what is left, the
// transfer, in the protected part.
//
// Held by std::shared_ptr wherever its life may end while somebody still needs it: what must keep it, like the autograd
// node of attention until its backward, takes a share of its own with shared_from_this().
class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  virtual ~Communicator() = default;

  int rank() const { return rank_; }
  int size() const { return size_; }
  virtual std::string_view backend() const = 0;  // "threads", "mpi", "nccl"

  // The number of one of these ranks among all ranks of the job: what messages call it.
  virtual int in_job(int rank) const { return rank; }

  // The communicator of the same ranks that carries CPU tensors: itself, except on a GPU. Agreement in words uses it.
  virtual Communicator& host() { return *this; }

  // Which ranks share a host. All are on one until set_hosts() says otherwise (bootstrap and process groups do); those
  // of a split are its ranks'.
  const RankHosts& hosts() const { return hosts_; }
  // of[r]: the host of rank r, under any number. The same on all ranks, before they communicate. Error(kPlan) where it
  // has not one for each rank.
  void set_hosts(const std::vector<int>& of);

  // Deadline of each operation, from its start to its end. Default: 300 s.
  Seconds timeout() const { return timeout_; }
  void set_timeout(Seconds timeout) { timeout_ = timeout; }

  // One grouped, non-blocking exchange of messages. Not a collective: only the named peers take part.
  // Send buffers must not change and receive buffers must not be read until the Work is complete. A received message
  // whose size differs from the posted tensor is Error(kMismatch). Never null.
  std::unique_ptr<Work> exchange(const std::vector<Message>& sends, const std::vector<Message>& receives,
                                 OpLabel label);

  // Collectives, in place where one tensor is given; blocking on a CPU. The order of additions depends only on size(),
  // hosts() and the tensor's shape, so that equal inputs give equal bits. kSum on fp32, fp64, int64; kMax/kMin
  // likewise. Once one has returned, its tensors may be overwritten (on a GPU: by what the current stream holds from
  // then on). On one host the order of an all_reduce is the backend's; over several all CPU backends have that of
  // reduce_scatter.
  void all_reduce(at::Tensor& tensor, ReduceOp op, OpLabel label);
  // out: [size, ...in.shape], rank by rank. In place where `in` is out[rank()].
  void all_gather(at::Tensor& out, const at::Tensor& in, OpLabel label);
  // in: [size, ...out.shape]; out = sum over ranks of in[rank()]. In place where `out` is in[rank()]. Takes bf16, too.
  // CPU backends add in the order of the ranks, 0 first, over several hosts inside each and then host by host
  // (hosts.h), bf16 in fp32 and rounded once; NCCL rounds bf16 as it adds, and goes by trees and rings of its own.
  void reduce_scatter(at::Tensor& out, const at::Tensor& in, OpLabel label);

  // Begin what these do, and return: the transfer moves along by progress() of any communicator of this rank and by
  // waits (on a GPU: on a stream of the communicator's own). The tensors are kept; `in` must not change and `out` not
  // be read until the Work is complete. Several may be under way at once, beside exchanges and blocking collectives;
  // all ranks begin and call the collectives of a communicator in the same order. Nothing waits for the ranks to agree
  // either: where they do not, Work::test() and wait() raise Error(kMismatch) on every rank (on a GPU, where the
  // transfer is then aborted and the communicator dead: or the next operation does). The deadline runs from the begin
  // (on a GPU: of the agreement; of the transfer from when the device gets to it). `label.operation` must outlive the
  // Work. Never null.
  std::unique_ptr<Work> begin_all_gather(const at::Tensor& out, const at::Tensor& in, OpLabel label);
  std::unique_ptr<Work> begin_reduce_scatter(const at::Tensor& out, const at::Tensor& in, OpLabel label);
  // The order of a CPU backend's additions is that of reduce_scatter, on one host, too.
  std::unique_ptr<Work> begin_all_reduce(const at::Tensor& tensor, ReduceOp op, OpLabel label);
  // The bytes of host memory that a reduce_scatter whose `in` has `payload` bytes takes besides its tensors, until it
  // is complete; a begun all_reduce of as many bytes likewise. Of bf16 over several hosts it is less than twice that.
  virtual int64_t reduce_scatter_holds(int64_t payload) const {
    (void)payload;
    return 0;
  }

  void broadcast(at::Tensor& tensor, int root, OpLabel label);
  void barrier(OpLabel label);

  // A communicator of the ranks with equal color, ordered by (key, rank). Collective. color < 0: joins none, returns
  // null.
  std::unique_ptr<Communicator> split(int color, int key);

  // Moves pending transfers along without blocking; cheap. The executor calls it between tiles of a few milliseconds.
  virtual void progress() = 0;

  const CommStats& stats() const { return stats_; }

 protected:
  // device: where tensors must lie; with an index, on that very device.
  Communicator(int rank, int size, at::Device device) : rank_(rank), size_(size), device_(device), hosts_(size) {}

  // ---- What a backend implements. The arguments have been checked. A transfer that is complete when the hook returns
  // is null, any other a Work.

  virtual std::unique_ptr<Work> start_exchange(const std::vector<Message>& sends, const std::vector<Message>& receives,
                                               OpLabel label) = 0;
  // All ranks have agreed on the call (gather_headers), and there is something to move. A barrier is the agreement.
  virtual std::unique_ptr<Work> start_all_reduce(at::Tensor& tensor, ReduceOp op, OpLabel label) = 0;
  virtual std::unique_ptr<Work> start_broadcast(at::Tensor& tensor, int root, OpLabel label) = 0;
  // An all_gather, a reduce_scatter or an all_reduce, on which the ranks have not agreed: the Work compares their
  // headers, too, and neither blocks. There may be nothing to move. Never null.
  virtual std::unique_ptr<Work> begin(const comm_internal::Begun& call) = 0;
  // Whether what is begun adds in the order that reduce_scatter() describes.
  virtual bool adds_in_rank_order() const { return true; }
  // Without the timeout, which split() hands on.
  virtual std::unique_ptr<Communicator> make_split(int color, int key, OpLabel label) = 0;

  // What each rank is about to do, in rank order: returns when all have come, and raises Error(kComm) naming those that
  // have not by the deadline. `brings` is this rank's input of the collective, undefined where it has none: ranks that
  // share memory may hand it over with the header. By default the headers travel over host(), which then must be
  // another communicator than this one.
  virtual std::vector<comm_internal::CollectiveHeader> gather_headers(const comm_internal::CollectiveHeader& mine,
                                                                      const at::Tensor& brings, OpLabel label);

  // Called at the start of every operation: raises what forbids it, and calls fail() when something has struck this
  // communicator from outside since the last look.
  virtual void look(OpLabel) {}

  // ---- The dead state. The first reason stays.

  // `told`: somebody raises it now. Otherwise the next operation raises it as it is, and all later ones that the
  // communicator is dead.
  void fail(ErrorKind kind, const std::string& why, bool told);
  bool failed() const { return failed_; }
  // Raises when this communicator is dead.
  void check_alive(OpLabel label);

  // ---- The time waited, by what for.

  enum class WaitFor { kOther, kExchange, kReduce, kGather };
  void add_wait(WaitFor what, Seconds time);
  // What the blocking collective that is being carried out waits for.
  WaitFor blocked_by() const { return blocked_by_; }

  // Adds the time that it exists.
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
  WaitFor blocked_by_ = WaitFor::kOther;
  bool failed_ = false;
  bool told_ = false;
  ErrorKind failed_kind_ = ErrorKind::kComm;
  std::string why_;
};

// Gathers one short text of every rank, in rank order; works at any length. Collective; bytes travel as uint8.
std::vector<std::string> all_gather_text(Communicator& comm, std::string_view text, OpLabel label);

}  // namespace annulus
