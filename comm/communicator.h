// Communicator: how ranks exchange tensors. The executor, the trainer and bootstrap call it; backends live in
// comm/threads (many ranks in one process), comm/mpi (CPU tensors, one process a rank) and comm/nccl (CUDA tensors).
//
// Contract, the same for every backend:
// - Every rank of a communicator calls the same operations in the same order.
// - Every wait has a deadline (`timeout`). What fails raises Error(kComm) naming operation, step and peer. After that
//   the communicator is dead: every later call raises at once, and buffers handed to it are neither freed nor reused.
// - What all ranks can see to be wrong together (shape, dtype, operation of a collective) raises Error(kMismatch) on
//   every rank, naming the ranks that differ and in what. Nothing hangs.
// - Tensors must be contiguous and on a device and of a dtype that the backend supports; anything else is refused with
//   Error(kPlan) before anything is sent.
// - Thread safety: a communicator belongs to one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace annulus {

using Seconds = std::chrono::duration<double>;

enum class ReduceOp { kSum, kMax, kMin };

// One tensor to or from one peer. A zero-element tensor is allowed and moves nothing. A rank may exchange with itself.
// Messages of one exchange between the same two ranks match in the order in which both sides list them.
struct Message {
  at::Tensor tensor;
  int peer = 0;
};

// Where an operation stands in the program, for error messages: "attention forward, layer 3", step 2.
struct OpLabel {
  std::string_view operation;  // must outlive the operation: a literal or a member
  int64_t step = 0;
};

// Started transfers. Destroying a Work that was not waited for waits for it (and reports, without throwing, a failure);
// while an exception unwinds the stack it is abandoned instead: the communicator is dead then, its peers find out by
// their deadlines (at once on the threads backend).
class Work {
 public:
  virtual ~Work() = default;
  // Makes progress; true when the transfers are complete. Raises as the communicator does.
  virtual bool test() = 0;
  // On a CPU: blocks until complete. On a GPU: orders the current compute stream after the transfers.
  virtual void wait() = 0;
};

// Totals since construction, kept by every backend: what tests and metrics read.
struct CommStats {
  int64_t messages_sent = 0;
  int64_t bytes_sent = 0;
  int64_t messages_received = 0;
  int64_t bytes_received = 0;
  double wait_seconds = 0;  // time the host spent blocked in wait(): exposed communication on a CPU
};

class Communicator {
 public:
  virtual ~Communicator() = default;

  int rank() const { return rank_; }
  int size() const { return size_; }
  virtual std::string_view backend() const = 0;  // "threads", "mpi", "nccl"

  // The communicator of the same ranks that carries CPU tensors: itself, except on a GPU. Agreement in words uses it.
  virtual Communicator& host() { return *this; }

  // Deadline of each operation, from its start to its end. Default: 300 s.
  Seconds timeout() const { return timeout_; }
  void set_timeout(Seconds timeout) { timeout_ = timeout; }

  // One grouped, non-blocking exchange of exchange(sends, receives). Not a collective: only the named peers take part.
  // Send buffers must not change and receive buffers must not be read until the Work is complete. A received message
  // whose size differs from the posted tensor is Error(kMismatch).
  virtual std::unique_ptr<Work> exchange(const std::vector<Message>& sends, const std::vector<Message>& receives,
                                         OpLabel label) = 0;

  // Collectives, in place where one tensor is given; blocking on a CPU. The order of additions depends only on size()
  // and the tensor's shape, so that equal inputs give equal bits. kSum on fp32, fp64, int64; kMax/kMin likewise.
  virtual void all_reduce(at::Tensor& tensor, ReduceOp op, OpLabel label) = 0;
  // out: [size, ...in.shape], rank by rank.
  virtual void all_gather(at::Tensor& out, const at::Tensor& in, OpLabel label) = 0;
  // in: [size, ...out.shape]; out = sum over ranks of in[rank()].
  virtual void reduce_scatter(at::Tensor& out, const at::Tensor& in, OpLabel label) = 0;
  virtual void broadcast(at::Tensor& tensor, int root, OpLabel label) = 0;
  virtual void barrier(OpLabel label) = 0;

  // A communicator of the ranks with equal color, ordered by (key, rank). Collective. color < 0: joins none, returns
  // null.
  virtual std::unique_ptr<Communicator> split(int color, int key) = 0;

  // Moves pending transfers along without blocking; cheap. The executor calls it between tiles of a few milliseconds.
  virtual void progress() = 0;

  const CommStats& stats() const { return stats_; }

 protected:
  Communicator(int rank, int size) : rank_(rank), size_(size) {}
  int rank_;
  int size_;
  Seconds timeout_{300};
  CommStats stats_;
};

// Gathers one short text of every rank, in rank order; works at any length. Collective; bytes travel as uint8.
std::vector<std::string> all_gather_text(Communicator& comm, std::string_view text, OpLabel label);

// Raises Error(kMismatch) on every rank, naming which ranks differ in which field, when the texts of the same field are
// not equal on all ranks. A field is a name and a value. Costs one small collective when all agree. Collective.
struct Field {
  std::string name;
  std::string value;
};
void require_agreement(Communicator& comm, const std::vector<Field>& fields, OpLabel label);

}  // namespace annulus
