// The MPI backend, which make_mpi_communicator() (mpi_internal.h) makes. It uses non-blocking calls and MPI_Testsome,
// polled until the deadline. Only a split blocks, under a watchdog and after all ranks are known to have come.
//
// - Point-to-point messages are received with MPI_ANY_TAG from a given rank. MPI keeps the order of messages between
//   two ranks, and the tag says which message between them it is and of what dtype. So a rank that is out of step is
//   detected, instead of being waited for with a tag that never comes.
// - Between ranks of one host a message may be the address of memory that its sender lends (memory/shared_memory.h),
//   instead of the elements. The tag says so.
// - Before a collective every rank sends its header to every other (MPI_Iallgather with more than 32 ranks). So a
//   missing rank can be named, and ranks that disagree all notice before any data are sent.
// - Collectives that are begun travel from rank to rank once the headers agree (begun_collective.h); the others are
//   MPI's.
// - There is no progress thread: progress() and waits move the data. Waits spin for about the expected time, then
//   sleep.
#include <exception>
#include <mutex>
#include <numeric>
#include <utility>

#include "comm/checks.h"
#include "comm/mpi/begun_collective.h"
#include "comm/mpi/exchanges.h"
#include "comm/mpi/mpi_internal.h"
#include "comm/mpi/requests.h"
#include "comm/watchdog.h"
#include "common/error.h"
#include "common/logging/log.h"
#include "memory/shared_memory.h"

namespace annulus::mpi_internal {
namespace {

using namespace comm_internal;

using BegunPtr = std::shared_ptr<BegunCollective>;

MPI_Datatype reducible_type(at::ScalarType dtype) {
  if (dtype == at::kFloat) return MPI_FLOAT;
  if (dtype == at::kDouble) return MPI_DOUBLE;
  return MPI_INT64_T;
}

MPI_Op mpi_op(ReduceOp op) { return op == ReduceOp::kSum ? MPI_SUM : op == ReduceOp::kMax ? MPI_MAX : MPI_MIN; }

class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator(std::shared_ptr<MpiRuntime> runtime, MPI_Comm data, MPI_Comm control, int rank,
                  std::vector<int> in_world)
      : Communicator(rank, static_cast<int>(in_world.size()), at::kCPU),
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
    move_along();
    const std::vector<PendingPtr> open = exchanges_.open();
    for (const PendingPtr& pending : open) {
      try {
        if (!failed()) die_of(exchanges_.look_at(pending));
      } catch (const Error& e) {
        die(pending, where(pending->label) + ": " + e.what(), /*told=*/false);
      }
    }
  }

  at::Tensor lendable(at::IntArrayRef sizes, const at::TensorOptions& options) override {
    SharedMemory* shared = runtime_->shared_memory();
    return shared != nullptr ? shared->allocate(sizes, options) : Communicator::lendable(sizes, options);
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

  std::unique_ptr<Work> start_exchange(const std::vector<Message>& sends, const std::vector<Message>& receives,
                                       OpLabel label) override;

  std::unique_ptr<Work> start_all_reduce(at::Tensor& tensor, ReduceOp op, OpLabel label) override {
    if (size_ == 1) return nullptr;
    return start_collective("all_reduce", label, tensor, tensor, [&](auto post) {
      const int64_t width = tensor.element_size();
      const int64_t step = std::max<int64_t>(1, piece_bytes() / width);
      char* data = static_cast<char*>(tensor.mutable_data_ptr());
      for (int64_t begin = 0; begin < tensor.numel(); begin += step) {
        const int count = static_cast<int>(std::min(step, tensor.numel() - begin));
        post([&](MPI_Request* request) {
          return MPI_Iallreduce(MPI_IN_PLACE, data + begin * width, count, reducible_type(tensor.scalar_type()),
                                mpi_op(op), data_, request);
        });
      }
    });
  }

  std::unique_ptr<Work> start_broadcast(at::Tensor& tensor, int root, OpLabel label) override {
    return start_collective("broadcast", label, tensor, tensor, [&](auto post) {
      const ByteType type = bytes_of(tensor.nbytes());
      post([&](MPI_Request* request) {
        return MPI_Ibcast(tensor.mutable_data_ptr(), type.count(), type.type(), root, data_, request);
      });
    });
  }

  std::unique_ptr<Work> begin(const Begun& call) override;

  std::unique_ptr<Communicator> make_split(int color, int key, OpLabel label) override {
    Watchdog watchdog(timeout_, [this, label] {
      return where(label) + ": " + describe_ranks(*this, {rank_}) + " waited in MPI_Comm_split for more than " +
             describe_seconds(timeout_.count()) + ": another rank is stopped or gone" + runtime_->stalled();
    });
    MPI_Comm data = MPI_COMM_NULL;
    {
      std::lock_guard<std::mutex> lock(runtime_->mutex());
      check_mpi(MPI_Comm_split(data_, color < 0 ? MPI_UNDEFINED : color, key, &data), "MPI_Comm_split");
    }
    return data == MPI_COMM_NULL ? nullptr : make_mpi_communicator(runtime_, data);
  }

 private:
  template <typename Started>
  friend class MpiWork;

  int64_t piece_bytes() const { return runtime_->options().max_piece_bytes; }

  ByteType bytes_of(size_t bytes) const { return ByteType(static_cast<int64_t>(bytes), piece_bytes()); }

  // After a failure MPI may still use the buffers of operations that are under way. They are leaked, and MPI is not
  // finalized. The caller holds the lock, for this function and those up to move_along().
  template <typename Kept>
  void die(const Kept& kept, const std::string& why, bool told = true) {
    kill(why, told);
    leak(kept);
  }

  template <typename Kept>
  static void leak(const Kept& kept) {
    [[maybe_unused]] const auto* leaked = new Kept(kept);
  }

  // told: the caller raises the error.
  void kill(const std::string& why, bool told = true) {
    if (failed()) return;
    fail(ErrorKind::kComm, why, told);
    exchanges_.abandon();
    std::erase_if(runtime_->begun(), [this](const BegunPtr& begun) {
      if (&begun->comm() != this) return false;
      leak(begun);
      return true;
    });
    runtime_->abandon();
  }

  // A message that was not the expected one makes the communicator dead, and the Work that expected it raises.
  void die_of(const PendingPtr& mismatched) {
    if (mismatched) die(mismatched, where(mismatched->label) + ": " + mismatched->mismatch);
  }

  // Advances everything that messages which have arrived allow.
  void move_along() {
    die_of(exchanges_.match());
    advance_all(runtime_->begun());
  }

  // Makes one pass over the requests. Returns true when all are complete. A failure makes the communicator dead, and
  // raises.
  bool test(const PendingPtr& pending) {
    Pending& p = *pending;
    const OpLabel label = p.label;
    if (complete(p)) return true;
    if (!failed()) {
      std::lock_guard<std::mutex> lock(runtime_->mutex());
      try {
        move_along();
        if (!failed()) die_of(exchanges_.look_at(pending));
      } catch (const Error& e) {
        die(pending, where(label) + ": " + e.what());
        throw;
      }
    }
    if (!p.mismatch.empty()) throw_mismatch(label, p.mismatch);
    if (failed()) {
      leak(pending);
      check_alive(label);
    }
    return complete(p);
  }

  // Advances what was begun. Returns true when it is complete, and raises if it never will be.
  bool test(const BegunPtr& begun) {
    {
      std::lock_guard<std::mutex> lock(runtime_->mutex());
      try {
        if (!failed()) move_along();
        if (begun->complete()) return true;
        if (begun->failure()) std::rethrow_exception(begun->failure());
      } catch (const Error& e) {
        // Ranks that disagree have sent no data, so the communicator stays usable.
        if (e.kind() != ErrorKind::kMismatch) {
          die(begun, where(begun->label()) + ": " + e.what());
        }
        throw;
      }
    }
    check_alive(begun->label());
    return false;
  }

  // A loan that could not be taken stays in `loans`, although its message has come.
  static bool complete(const Pending& pending) {
    return pending.open == 0 && pending.loans.empty() && pending.mismatch.empty();
  }
  static bool complete(const BegunCollective& begun) { return begun.complete(); }
  // The number of events before the wait that do not show that peers wait as well: after sending its header, a rank may
  // compute.
  static int64_t unseen(const Pending&) { return 0; }
  int64_t unseen(const BegunCollective& begun) const {
    std::lock_guard<std::mutex> lock(runtime_->mutex());
    return begun.agreed() ? 1 : 0;
  }
  static OpLabel label_of(const Pending& pending) { return pending.label; }
  static OpLabel label_of(const BegunCollective& begun) { return begun.label(); }
  WaitFor waits_for(const Pending& pending) const {
    return pending.collective == nullptr ? WaitFor::kExchange : blocked_by();
  }
  static WaitFor waits_for(const BegunCollective& begun) {
    return begun.reduces() ? WaitFor::kReduce : WaitFor::kGather;
  }

  // Waits until `started`, which is a Pending or a BegunCollective, is complete.
  template <typename Started>
  void wait(const std::shared_ptr<Started>& started, Clock::time_point deadline, Seconds timeout) {
    const Waiting waiting(*this, waits_for(*started));
    const auto moved = [&, before = unseen(*started)] {
      std::lock_guard<std::mutex> lock(runtime_->mutex());
      Movement moved = movement(*started);
      moved.events -= before;
      return moved;
    };
    if (poll_until([&] { return test(started); }, moved, deadline)) return;
    const OpLabel label = label_of(*started);
    const std::string stalled = runtime_->stalled();
    std::lock_guard<std::mutex> lock(runtime_->mutex());
    const std::string why =
        describe_unfinished(*this, *started) + " within " + describe_seconds(timeout.count()) + stalled;
    die(started, where(label) + ": " + why);
    throw_comm(label, why);
  }

  // Runs `body`, which posts requests to `pending`, under the lock. If it fails, MPI still owns what was posted before.
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

  // Starts a collective of one or more requests, which `body` posts. a and b are its buffers.
  template <typename Body>
  std::unique_ptr<Work> start_collective(const char* name, OpLabel label, const at::Tensor& a, const at::Tensor& b,
                                         Body body);

  std::shared_ptr<MpiRuntime> runtime_;
  std::vector<int> in_world_;  // the rank in MPI_COMM_WORLD of each rank
  MPI_Comm data_;
  MPI_Comm control_;
  Exchanges exchanges_;
};

template <typename Started>
class MpiWork final : public Work {
 public:
  MpiWork(MpiCommunicator& comm, std::shared_ptr<Started> started, Clock::time_point deadline)
      : comm_(comm),
        started_(std::move(started)),
        deadline_(deadline),
        timeout_(comm.timeout()),
        exceptions_(std::uncaught_exceptions()) {}

  ~MpiWork() override {
    if (!started_) return;
    if (std::uncaught_exceptions() > exceptions_) {
      std::lock_guard<std::mutex> lock(comm_.runtime_->mutex());
      if (comm_.complete(*started_)) return;
      comm_.die(started_, where(comm_.label_of(*started_)) + ": abandoned after another error");
      return;
    }
    try {
      wait();
    } catch (const std::exception& e) {
      log_error(e, comm_.in_job(comm_.rank()));
    }
  }

  bool test() override {
    if (!started_) return true;
    // If this raises, the Work is over: started_ stays null.
    const std::shared_ptr<Started> started = std::exchange(started_, nullptr);
    if (comm_.test(started)) return true;
    started_ = started;
    if (Clock::now() >= deadline_) wait();  // tests once more, then raises
    return !started_;
  }

  void wait() override {
    if (const std::shared_ptr<Started> started = std::exchange(started_, nullptr)) {
      comm_.wait(started, deadline_, timeout_);
    }
  }

 private:
  MpiCommunicator& comm_;
  std::shared_ptr<Started> started_;  // null once it is over
  Clock::time_point deadline_;
  Seconds timeout_;
  int exceptions_;
};

std::unique_ptr<Work> MpiCommunicator::begin(const Begun& call) {
  const auto begun = std::make_shared<BegunCollective>(*this, control_, piece_bytes(), call);
  auto work = std::make_unique<MpiWork<BegunCollective>>(*this, begun, deadline_of(timeout_));
  runtime_->note_timeout(timeout_);
  std::lock_guard<std::mutex> lock(runtime_->mutex());
  runtime_->begun().push_back(begun);
  try {
    begun->start();
    move_along();
  } catch (const Error& e) {
    kill(where(call.label) + ": " + e.what());
    throw;
  }
  return work;
}

std::vector<CollectiveHeader> MpiCommunicator::gather_headers(const CollectiveHeader& mine, const at::Tensor&,
                                                              OpLabel label) {
  const auto pending = std::make_shared<Pending>();
  const auto deadline = deadline_of(timeout_);
  start(pending, [&] { post_headers(*this, control_, mine, label, *pending); });
  wait(pending, deadline, timeout_);
  return pending->headers;
}

template <typename Body>
std::unique_ptr<Work> MpiCommunicator::start_collective(const char* name, OpLabel label, const at::Tensor& a,
                                                        const at::Tensor& b, Body body) {
  const auto pending = std::make_shared<Pending>();
  pending->label = label;
  pending->collective = name;
  const auto bytes = static_cast<int64_t>(a.is_same(b) ? a.nbytes() : a.nbytes() + b.nbytes());
  const auto deadline = deadline_of(timeout_);
  start(pending, [&] {
    body([&](auto call) {
      MPI_Request request = MPI_REQUEST_NULL;
      const int code = call(&request);
      post(*this, *pending, request, {{-1, false, pending->items.empty() ? bytes : 0}, a, 0, b}, code);
    });
  });
  return std::make_unique<MpiWork<Pending>>(*this, pending, deadline);
}

std::unique_ptr<Work> MpiCommunicator::start_exchange(const std::vector<Message>& sends,
                                                      const std::vector<Message>& receives, OpLabel label) {
  const auto pending = std::make_shared<Pending>();
  pending->label = label;
  const auto deadline = deadline_of(timeout_);
  start(pending, [&] {
    exchanges_.post(pending, sends, receives);
    die_of(exchanges_.match());
  });
  return std::make_unique<MpiWork<Pending>>(*this, pending, deadline);
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
