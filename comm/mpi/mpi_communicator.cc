// The MPI backend, which make_mpi_communicator() (mpi_internal.h) makes. It uses non-blocking calls and MPI_Testsome,
// polled until the deadline. Only a split blocks, under a watchdog and after all ranks are known to have come.
//
// - Point-to-point messages are received with MPI_ANY_TAG from a given rank. MPI keeps the order of messages between
//   two ranks, and the tag holds which message between them it is and of what dtype. So a rank that is out of step is
//   detected, instead of being waited for with a tag that never comes.
// - Between ranks of one host a message may be the address of memory that its sender lends
// (memory/pool/shared_memory.h),
//   instead of the elements. The tag marks it.
// - Before a collective every rank sends its header to every other (MPI_Iallgather with more than 32 ranks). So a
//   missing rank can be named, and ranks that disagree all notice before any data are sent.
// - Collectives that are begun travel from rank to rank once the headers agree (comm/begun_collective.h); the others
//   are MPI's.
// - There is no progress thread: progress() and waits move the data. Waits spin for about the expected time, then
//   sleep.
#include <exception>
#include <mutex>
#include <numeric>
#include <utility>

#include "comm/checks.h"
#include "comm/communicator_backend.h"
#include "comm/deadline.h"
#include "comm/mpi/begun_collective.h"
#include "comm/mpi/exchanges.h"
#include "comm/mpi/mpi_internal.h"
#include "comm/mpi/requests.h"
#include "comm/watchdog.h"
#include "common/error.h"
#include "memory/pool/shared_memory.h"

namespace annulus::mpi_internal {
namespace {

using namespace comm_internal;

MPI_Datatype reducible_type(at::ScalarType dtype) {
  if (dtype == at::kFloat) return MPI_FLOAT;
  if (dtype == at::kDouble) return MPI_DOUBLE;
  return MPI_INT64_T;
}

MPI_Op mpi_op(ReduceOp op) { return op == ReduceOp::kSum ? MPI_SUM : op == ReduceOp::kMax ? MPI_MAX : MPI_MIN; }

class MpiCommunicator final : public CommunicatorBackend {
 public:
  MpiCommunicator(std::shared_ptr<MpiRuntime> runtime, MPI_Comm data, MPI_Comm control, int rank,
                  std::vector<int> in_world)
      : CommunicatorBackend(rank, static_cast<int>(in_world.size()), at::kCPU),
        runtime_(std::move(runtime)),
        in_world_(std::move(in_world)),
        data_(data),
        control_(control),
        exchanges_(*this, *runtime_, data) {}

  ~MpiCommunicator() override {
    // Freeing is collective, so it is left out if the other ranks may never come.
    if (failed() || std::uncaught_exceptions() > 0) return;
    std::lock_guard<std::mutex> lock(runtime_->mutex());
    int ended = 0;
    if (MPI_Finalized(&ended) != MPI_SUCCESS || ended != 0) return;
    MPI_Comm_free(&control_);
    MPI_Comm_free(&data_);
  }

  std::string_view backend() const override { return "mpi"; }
  int in_job(int rank) const override { return runtime_->in_job(in_world_[static_cast<size_t>(rank)]); }

  void progress() override {
    if (failed()) return;
    std::lock_guard<std::mutex> lock(runtime_->mutex());
    // On one host nothing is left to do for a message that MPI has called complete.
    if (runtime_->exchanges() == 0 && runtime_->begun().empty() && runtime_->one_host()) return;
    int flag = 0;
    // This probe never finds a message, so MPI always makes progress on everything before it returns.
    MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_SELF, &flag, MPI_STATUS_IGNORE);
    advance();
    const std::vector<PendingPtr> open = exchanges_.open();
    for (const PendingPtr& pending : open) {
      try {
        if (!failed()) die_of(exchanges_.poll(pending));
      } catch (const Error& e) {
        die(pending, where(pending->label) + ": " + e.what(), /*raised=*/false);
      }
    }
  }

  at::Tensor lendable(at::IntArrayRef sizes, const at::TensorOptions& options) override {
    SharedMemory* shared = runtime_->shared_memory();
    return shared != nullptr ? shared->allocate(sizes, options) : CommunicatorBackend::lendable(sizes, options);
  }

  int64_t reduce_scatter_holds(int64_t payload) const override {
    return messages_hold(hosts_.groups(), rank_, payload);
  }

 protected:
  bool can_lend_to(int peer) const override {
    return runtime_->shares_memory_with(in_world_[static_cast<size_t>(peer)]);
  }

  bool is_lendable(const at::Tensor& tensor) const override { return runtime_->shared_memory()->holds(tensor); }

  std::vector<CollectiveHeader> gather_headers(const CollectiveHeader& mine, const at::Tensor& brings,
                                               OpLabel label) override;

  std::unique_ptr<StartedOperation> start_exchange(const std::vector<Message>& sends,
                                                   const std::vector<Message>& receives, OpLabel label) override;

  std::unique_ptr<StartedOperation> start_all_reduce(at::Tensor& tensor, ReduceOp op, OpLabel label) override {
    if (size_ == 1) return nullptr;
    return start_collective("all_reduce", label, tensor, [&](auto start_request) {
      const int64_t width = tensor.element_size();
      const int64_t step = std::max<int64_t>(1, piece_bytes() / width);
      char* data = static_cast<char*>(tensor.mutable_data_ptr());
      for (int64_t begin = 0; begin < tensor.numel(); begin += step) {
        const int count = static_cast<int>(std::min(step, tensor.numel() - begin));
        start_request([&](MPI_Request* request) {
          return MPI_Iallreduce(MPI_IN_PLACE, data + begin * width, count, reducible_type(tensor.scalar_type()),
                                mpi_op(op), data_, request);
        });
      }
    });
  }

  std::unique_ptr<StartedOperation> start_broadcast(at::Tensor& tensor, int root, OpLabel label) override {
    return start_collective("broadcast", label, tensor, [&](auto start_request) {
      const ByteType type(static_cast<int64_t>(tensor.nbytes()), piece_bytes());
      start_request([&](MPI_Request* request) {
        return MPI_Ibcast(tensor.mutable_data_ptr(), type.count(), type.type(), root, data_, request);
      });
    });
  }

  std::unique_ptr<StartedOperation> begin(const Begun& call) override;

  std::unique_ptr<Communicator> make_split(int color, int key, OpLabel label) override {
    Watchdog watchdog(timeout_, [this, label] {
      return missed_deadline(where(label) + ": MPI_Comm_split of " + describe_ranks(*this, {rank_}) + " did not return",
                             timeout_) +
             ": another rank is stopped or gone" + runtime_->stalled();
    });
    MPI_Comm data = MPI_COMM_NULL;
    {
      std::lock_guard<std::mutex> lock(runtime_->mutex());
      check_mpi(MPI_Comm_split(data_, color < 0 ? MPI_UNDEFINED : color, key, &data), "MPI_Comm_split");
    }
    return data == MPI_COMM_NULL ? nullptr : make_mpi_communicator(runtime_, data);
  }

 private:
  class Operation;
  class Requests;
  class BegunOperation;

  int64_t piece_bytes() const { return runtime_->options().max_piece_bytes; }

  // After a failure MPI may still use the buffers of operations that are under way. They are leaked, and MPI is not
  // finalized. The caller holds the lock, for this function and those up to advance(). raised: the caller raises the
  // error.
  void die(const std::shared_ptr<const void>& kept, const std::string& why, bool raised = true) {
    if (!failed()) {
      fail(ErrorKind::kComm, why, raised);
      exchanges_.abandon();
      abandon_all(runtime_->begun(), *this);
      runtime_->abandon();
    }
    leak(kept);
  }

  static void leak(const std::shared_ptr<const void>& kept) {
    [[maybe_unused]] const auto* leaked = new std::shared_ptr<const void>(kept);
  }

  // A message that was not the expected one makes the communicator dead, and the Work that expected it raises.
  void die_of(const PendingPtr& mismatched) {
    if (mismatched) die(mismatched, where(mismatched->label) + ": " + mismatched->mismatch);
  }

  // Advances everything that messages which have arrived allow.
  void advance() {
    die_of(exchanges_.match());
    advance_all(runtime_->begun());
  }

  // Runs `body`, which starts requests and adds them to `pending`, under the lock. If it fails, MPI still owns those
  // that were started before.
  template <typename Body>
  void start(const PendingPtr& pending, Body body) {
    runtime_->note_timeout(timeout_);
    std::lock_guard<std::mutex> lock(runtime_->mutex());
    try {
      body();
    } catch (const Error& e) {
      die(pending, e.what());
      throw;
    }
  }

  // Starts a collective of one or more requests over the elements of a tensor, which `body` starts.
  template <typename Body>
  std::unique_ptr<StartedOperation> start_collective(const char* name, OpLabel label, const at::Tensor& tensor,
                                                     Body body);

  std::shared_ptr<MpiRuntime> runtime_;
  std::vector<int> in_world_;  // the rank in MPI_COMM_WORLD of each rank
  MPI_Comm data_;
  MPI_Comm control_;
  Exchanges exchanges_;
};

// What was started: requests, or a collective that was begun.
class MpiCommunicator::Operation : public StartedOperation {
 public:
  bool test() final { return poll() || (deadline_.passed() && wait()); }  // wait() polls once more, then raises

  bool wait() final {
    const Waiting waiting(comm_, what_);
    const auto moved = [&, before = unseen()] {
      const std::lock_guard<std::mutex> lock(comm_.runtime_->mutex());
      Movement moved = movement();
      moved.events -= before;
      return moved;
    };
    if (poll_until([&] { return poll(); }, moved, deadline_.time)) return true;
    const std::string stalled = comm_.runtime_->stalled();
    const std::lock_guard<std::mutex> lock(comm_.runtime_->mutex());
    const std::string why = missed_deadline(describe_unfinished(), deadline_.timeout) + stalled;
    comm_.die(kept_, where(label_) + ": " + why);
    throw_comm(label_, why);
  }

  void abandon() final {
    const std::lock_guard<std::mutex> lock(comm_.runtime_->mutex());
    if (!complete()) comm_.die(kept_, where(label_) + ": abandoned after another error");
  }

 protected:
  // kept: what MPI may still use after a failure.
  Operation(MpiCommunicator& comm, OpLabel label, WaitFor what, std::shared_ptr<const void> kept)
      : comm_(comm), label_(label), what_(what), kept_(std::move(kept)), deadline_(comm.timeout()) {}

  // Makes one pass over what is under way. Returns true when the operation is complete, and raises if it never will be.
  virtual bool poll() = 0;
  virtual bool complete() const = 0;
  virtual Movement movement() const = 0;
  // The number of events before the wait that do not show that peers wait as well.
  virtual int64_t unseen() const { return 0; }
  virtual std::string describe_unfinished() const = 0;

  MpiCommunicator& comm_;
  OpLabel label_;
  WaitFor what_;
  std::shared_ptr<const void> kept_;
  Deadline deadline_;
};

class MpiCommunicator::Requests final : public Operation {
 public:
  Requests(MpiCommunicator& comm, const PendingPtr& pending, WaitFor what)
      : Operation(comm, pending->label, what, pending), pending_(pending) {}

 private:
  // A failure makes the communicator dead.
  bool poll() override {
    if (complete()) return true;
    if (!comm_.failed()) {
      const std::lock_guard<std::mutex> lock(comm_.runtime_->mutex());
      try {
        comm_.advance();
        if (!comm_.failed()) comm_.die_of(comm_.exchanges_.poll(pending_));
      } catch (const Error& e) {
        comm_.die(kept_, where(label_) + ": " + e.what());
        throw;
      }
    }
    if (!pending_->mismatch.empty()) throw_mismatch(label_, pending_->mismatch);
    if (comm_.failed()) {
      leak(kept_);
      comm_.check_alive(label_);
    }
    return complete();
  }

  // A loan that could not be taken stays in `loans`, although its message has come.
  bool complete() const override {
    return pending_->open == 0 && pending_->loans.empty() && pending_->mismatch.empty();
  }
  Movement movement() const override { return mpi_internal::movement(*pending_); }
  std::string describe_unfinished() const override { return mpi_internal::describe_unfinished(comm_, *pending_); }

  PendingPtr pending_;
};

class MpiCommunicator::BegunOperation final : public Operation {
 public:
  BegunOperation(MpiCommunicator& comm, const Begun& call, const std::shared_ptr<MpiBegunCollective>& begun)
      : Operation(comm, call.label, wait_for(call), begun), begun_(begun) {}

 private:
  bool poll() override {
    {
      const std::lock_guard<std::mutex> lock(comm_.runtime_->mutex());
      try {
        if (!comm_.failed()) comm_.advance();
        if (begun_->check()) return true;
      } catch (const Error& e) {
        // Ranks that disagree have sent no data, so the communicator stays usable.
        if (e.kind() != ErrorKind::kMismatch) comm_.die(kept_, where(label_) + ": " + e.what());
        throw;
      }
    }
    comm_.check_alive(label_);
    return false;
  }

  bool complete() const override { return begun_->complete(); }
  Movement movement() const override { return begun_->movement(); }
  // After sending its header, a rank may compute.
  int64_t unseen() const override {
    const std::lock_guard<std::mutex> lock(comm_.runtime_->mutex());
    return begun_->have_headers() ? 1 : 0;
  }
  std::string describe_unfinished() const override { return begun_->describe_unfinished(); }

  std::shared_ptr<MpiBegunCollective> begun_;
};

std::unique_ptr<StartedOperation> MpiCommunicator::begin(const Begun& call) {
  const auto begun = std::make_shared<MpiBegunCollective>(*this, control_, piece_bytes(), call);
  auto operation = std::make_unique<BegunOperation>(*this, call, begun);
  runtime_->note_timeout(timeout_);
  const std::lock_guard<std::mutex> lock(runtime_->mutex());
  try {
    begun->start_headers();
    runtime_->begun().push_back(begun);
    advance();
  } catch (const Error& e) {
    die(begun, where(call.label) + ": " + e.what());
    throw;
  }
  return operation;
}

std::vector<CollectiveHeader> MpiCommunicator::gather_headers(const CollectiveHeader& mine, const at::Tensor&,
                                                              OpLabel label) {
  const auto pending = std::make_shared<Pending>();
  pending->label = label;
  Requests operation(*this, pending, blocked_by());
  start(pending, [&] { start_headers(*this, control_, mine, *pending); });
  operation.wait();
  return pending->headers;
}

template <typename Body>
std::unique_ptr<StartedOperation> MpiCommunicator::start_collective(const char* name, OpLabel label,
                                                                    const at::Tensor& tensor, Body body) {
  const auto pending = std::make_shared<Pending>();
  pending->label = label;
  pending->collective = name;
  auto operation = std::make_unique<Requests>(*this, pending, blocked_by());
  start(pending, [&] {
    body([&](auto call) {
      MPI_Request request = MPI_REQUEST_NULL;
      const int code = call(&request);
      const int64_t bytes = pending->items.empty() ? static_cast<int64_t>(tensor.nbytes()) : 0;
      add_request(*this, *pending, request, {{-1, false, bytes}, tensor}, code);
    });
  });
  return operation;
}

std::unique_ptr<StartedOperation> MpiCommunicator::start_exchange(const std::vector<Message>& sends,
                                                                  const std::vector<Message>& receives, OpLabel label) {
  const auto pending = std::make_shared<Pending>();
  pending->label = label;
  auto operation = std::make_unique<Requests>(*this, pending, WaitFor::kExchange);
  start(pending, [&] {
    exchanges_.start(pending, sends, receives);
    die_of(exchanges_.match());
  });
  return operation;
}

}  // namespace

std::unique_ptr<Communicator> make_mpi_communicator(std::shared_ptr<MpiRuntime> runtime, MPI_Comm data) {
  std::lock_guard<std::mutex> lock(runtime->mutex());
  int rank = 0;
  int size = 1;
  MPI_Comm control = MPI_COMM_NULL;
  MPI_Group group = MPI_GROUP_NULL, world = MPI_GROUP_NULL;
  check_mpi(MPI_Comm_rank(data, &rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(data, &size), "MPI_Comm_size");
  check_mpi(MPI_Comm_group(data, &group), "MPI_Comm_group");
  check_mpi(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
  std::vector<int> ranks(static_cast<size_t>(size)), in_world(ranks.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  check_mpi(MPI_Group_translate_ranks(group, size, ranks.data(), world, in_world.data()), "MPI_Group_translate_ranks");
  check_mpi(MPI_Group_free(&group), "MPI_Group_free");
  check_mpi(MPI_Group_free(&world), "MPI_Group_free");
  check_mpi(MPI_Comm_dup(data, &control), "MPI_Comm_dup");
  check_mpi(MPI_Comm_set_errhandler(data, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check_mpi(MPI_Comm_set_errhandler(control, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return std::make_unique<MpiCommunicator>(runtime, data, control, rank, std::move(in_world));
}

}  // namespace annulus::mpi_internal
