// The MPI backend. Only non-blocking calls and Testsome, polled against the deadline; split alone blocks, under a
// watchdog and only after all ranks are known to have come.
//
// - A point-to-point message is received with MPI_ANY_TAG from a named rank: MPI keeps the order of messages between
//   two ranks, and the tag that arrives says which message of that pair it is and of what dtype, so that ranks out of
//   step are told apart instead of waiting for ever for a tag that never comes.
// - Before a collective every rank sends its header to every other (up to kDirectHeaders ranks; an all-gather beyond),
//   so that a missing rank can be named and ranks that disagree all know it before any data moves.
// - No progress thread: progress() and the waits move data. Waits spin for about the expected time, then sleep.
#include <cstdio>
#include <deque>
#include <exception>
#include <mutex>
#include <numeric>
#include <utility>

#include "comm/checks.h"
#include "comm/mpi/message_tags.h"
#include "comm/mpi/mpi_internal.h"
#include "comm/mpi/requests.h"
#include "comm/watchdog.h"
#include "common/error.h"
#include "common/text.h"

namespace annulus::mpi_internal {
namespace {

using namespace comm_internal;

constexpr int kDirectHeaders = 32;

MPI_Datatype reducible_type(at::ScalarType dtype) {
  if (dtype == at::kFloat) return MPI_FLOAT;
  if (dtype == at::kDouble) return MPI_DOUBLE;
  return MPI_INT64_T;
}

MPI_Op mpi_op(ReduceOp op) { return op == ReduceOp::kSum ? MPI_SUM : op == ReduceOp::kMax ? MPI_MAX : MPI_MIN; }

// MPI_TAG_UB
int64_t highest_tag(MPI_Comm comm) {
  void* bound = nullptr;
  int found = 0;
  check_mpi(MPI_Comm_get_attr(comm, MPI_TAG_UB, static_cast<void*>(&bound), &found), "MPI_Comm_get_attr");
  return found != 0 ? *static_cast<int*>(bound) : 32767;
}

class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator(std::shared_ptr<MpiRuntime> runtime, MPI_Comm data, MPI_Comm control, int rank,
                  std::vector<int> in_world)
      : Communicator(rank, static_cast<int>(in_world.size()), at::kCPU),
        runtime_(std::move(runtime)),
        in_world_(std::move(in_world)),
        data_(data),
        control_(control),
        tags_(highest_tag(data)),
        sent_(in_world_.size(), 0),
        received_(in_world_.size(), 0),
        expected_(in_world_.size()) {}

  ~MpiCommunicator() override {
    // Freeing is collective: not when the others may never come.
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
    int flag = 0;
    std::lock_guard<std::mutex> lock(runtime_->mutex());
    // Never matches, and so always moves everything along.
    MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_SELF, &flag, MPI_STATUS_IGNORE);
    match_receives();
  }

 protected:
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

  std::unique_ptr<Work> start_all_gather(at::Tensor& out, const at::Tensor& in, OpLabel label) override {
    return start_collective("all_gather", label, in, out, [&](auto post) {
      const ByteType type = bytes_of(in.nbytes());
      post([&](MPI_Request* request) {
        return MPI_Iallgather(in.const_data_ptr(), type.count(), type.type(), out.mutable_data_ptr(), type.count(),
                              type.type(), data_, request);
      });
    });
  }

  std::unique_ptr<Work> start_reduce_scatter(at::Tensor& out, const at::Tensor& in, OpLabel label) override {
    return start_collective("reduce_scatter", label, in, out, [&](auto post) {
      const int64_t n = out.numel();
      const int64_t width = out.element_size();
      const MPI_Datatype type = reducible_type(in.scalar_type());
      const char* from = static_cast<const char*>(in.const_data_ptr());
      char* to = static_cast<char*>(out.mutable_data_ptr());
      const int64_t step = std::max<int64_t>(1, piece_bytes() / width);
      if (n <= step) {
        post([&](MPI_Request* request) {
          return MPI_Ireduce_scatter_block(from, to, static_cast<int>(n), type, MPI_SUM, data_, request);
        });
        return;
      }
      for (int root = 0; root < size_; ++root) {
        for (int64_t begin = 0; begin < n; begin += step) {
          post([&](MPI_Request* request) {
            return MPI_Ireduce(from + (root * n + begin) * width, to + begin * width,
                               static_cast<int>(std::min(step, n - begin)), type, MPI_SUM, root, data_, request);
          });
        }
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

  std::unique_ptr<Communicator> make_split(int color, int key, OpLabel label) override {
    Watchdog watchdog(timeout_, [this, label] {
      return "[comm] " + where(label) + ": " + describe_ranks(*this, {rank_}) +
             " waited in MPI_Comm_split for more than " + describe_seconds(timeout_.count()) +
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
  friend class MpiWork;

  int64_t piece_bytes() const { return runtime_->options().max_piece_bytes; }

  ByteType bytes_of(size_t bytes) const { return ByteType(static_cast<int64_t>(bytes), piece_bytes()); }

  static std::string describe_tag(int tag) {
    return "message " + std::to_string(MessageTags::sequence_of(tag)) + " between these ranks, " +
           dtype_name(MessageTags::dtype_of(tag));
  }

  // After a failure MPI may still use the buffers of `pending`: they are leaked, and MPI is not finalized.
  void die(const PendingPtr& pending, const std::string& why) {
    kill(why);
    leak(pending);
  }

  static void leak(const PendingPtr& pending) { [[maybe_unused]] const auto* leaked = new PendingPtr(pending); }

  void kill(const std::string& why) {
    if (failed()) return;
    fail(ErrorKind::kComm, why, /*told=*/true);
    [[maybe_unused]] const auto* leaked = new auto(std::move(expected_));
    expected_.clear();
    expected_.resize(static_cast<size_t>(size_));
    expecting_.clear();
    runtime_->abandon();
  }

  // Takes the messages that have come, in order, into the buffers that wait for them. The lock is held. A message that
  // is not the one expected kills the communicator; the Work that expected it raises.
  void match_receives() {
    for (size_t i = 0; i < expecting_.size();) {
      const int peer = expecting_[i];
      auto& queue = expected_[static_cast<size_t>(peer)];
      while (!queue.empty()) {
        MPI_Message message = MPI_MESSAGE_NULL;
        MPI_Status status;
        int came = 0;
        check_mpi(MPI_Improbe(peer, MPI_ANY_TAG, data_, &came, &message, &status), "MPI_Improbe");
        if (came == 0) break;
        const auto [pending, index] = queue.front();
        queue.pop_front();
        Pending::Item& item = pending->items[index];
        MPI_Count bytes = 0;
        check_mpi(MPI_Get_elements_x(&status, MPI_BYTE, &bytes), "MPI_Get_elements_x");
        if (status.MPI_TAG != item.tag || bytes != item.bytes) {
          pending->mismatch = describe_ranks(*this, {item.peer}) + " sent " + std::to_string(bytes) + " bytes (" +
                              describe_tag(status.MPI_TAG) + "), but " + describe_ranks(*this, {rank_}) + " expected " +
                              std::to_string(item.bytes) + " bytes (" + describe_tag(item.tag) + ", " +
                              list_text(item.tensor.sizes()) + ")";
          die(pending, where(pending->label) + ": " + pending->mismatch);
          return;
        }
        const ByteType type = bytes_of(item.tensor.nbytes());
        check_mpi(
            MPI_Imrecv(item.tensor.mutable_data_ptr(), type.count(), type.type(), &message, &pending->requests[index]),
            "MPI_Imrecv");
      }
      if (queue.empty()) {
        expecting_[i] = expecting_.back();
        expecting_.pop_back();
      } else {
        ++i;
      }
    }
  }

  // One pass over the requests. True when all are complete. A failure kills the communicator and raises.
  bool test(const PendingPtr& pending, OpLabel label) {
    Pending& p = *pending;
    if (p.open == 0) return true;
    if (!failed()) {
      std::lock_guard<std::mutex> lock(runtime_->mutex());
      try {
        match_receives();
        if (!failed()) test_requests(p);
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
    return p.open == 0;
  }

  void test_requests(Pending& p) {
    p.indices.resize(p.requests.size());
    p.statuses.resize(p.requests.size());
    int done = 0;
    const int code = MPI_Testsome(static_cast<int>(p.requests.size()), p.requests.data(), &done, p.indices.data(),
                                  p.statuses.data());
    if (code != MPI_ERR_IN_STATUS) check_mpi(code, "MPI_Testsome");
    if (done == MPI_UNDEFINED) return;  // no message has come yet
    for (int i = 0; i < done; ++i) {
      Pending::Item& item = p.items[static_cast<size_t>(p.indices[static_cast<size_t>(i)])];
      const int error = p.statuses[static_cast<size_t>(i)].MPI_ERROR;
      if (code == MPI_ERR_IN_STATUS && error != MPI_SUCCESS) {
        throw_comm(p.label, describe(*this, item) + " failed: " + mpi_error_text(error));
      }
      item.done = true;
      --p.open;
    }
  }

  // Waits for all of pending.
  void wait(const PendingPtr& pending, Clock::time_point deadline, Seconds timeout, Seconds expected) {
    const Waiting waiting(*this);
    const OpLabel label = pending->label;
    if (poll_until([&] { return test(pending, label); }, deadline, expected)) return;
    const std::string why =
        describe_unfinished(*this, *pending) + " within " + describe_seconds(timeout.count()) + runtime_->stalled();
    die(pending, where(label) + ": " + why);
    throw_comm(label, why);
  }

  // Records a request that a non-blocking call has started, or has failed to.
  void post(Pending& p, MPI_Request request, Pending::Item item, int code) {
    if (code != MPI_SUCCESS)
      throw_comm(p.label, describe(*this, item) + " could not be started: " + mpi_error_text(code));
    p.requests.push_back(request);
    p.items.push_back(std::move(item));
    ++p.open;
  }

  // Runs body, which posts to pending, under the lock. What was posted before a failure still belongs to MPI.
  template <typename Body>
  void start(const PendingPtr& pending, Body body) {
    try {
      runtime_->note_timeout(timeout_);
      std::lock_guard<std::mutex> lock(runtime_->mutex());
      body();
    } catch (const Error& e) {
      die(pending, e.what());
      throw;
    }
  }

  // Starts a collective of one or more requests. body posts them; a and b are its buffers.
  template <typename Body>
  std::unique_ptr<Work> start_collective(const char* name, OpLabel label, const at::Tensor& a, const at::Tensor& b,
                                         Body body);

  std::shared_ptr<MpiRuntime> runtime_;
  std::vector<int> in_world_;  // the rank of each in MPI_COMM_WORLD
  MPI_Comm data_;
  MPI_Comm control_;
  MessageTags tags_;
  std::vector<int64_t> sent_;  // messages so far, by peer
  std::vector<int64_t> received_;
  // Receives whose message has not come, in order, by peer; and the peers that have any.
  std::vector<std::deque<std::pair<PendingPtr, size_t>>> expected_;
  std::vector<int> expecting_;
};

class MpiWork final : public Work {
 public:
  MpiWork(MpiCommunicator& comm, PendingPtr pending, Clock::time_point deadline)
      : comm_(comm),
        pending_(std::move(pending)),
        deadline_(deadline),
        timeout_(comm.timeout()),
        exceptions_(std::uncaught_exceptions()) {}

  ~MpiWork() override {
    if (!pending_) return;
    if (std::uncaught_exceptions() > exceptions_) {
      comm_.die(pending_, where(pending_->label) + ": abandoned after another error");
      return;
    }
    try {
      wait();
    } catch (const std::exception& e) {
      std::fprintf(stderr, "rank %d: %s\n", comm_.in_job(comm_.rank()), e.what());
    }
  }

  bool test() override {
    if (!pending_) return true;
    if (comm_.test(pending_, pending_->label)) {
      pending_.reset();
      return true;
    }
    if (Clock::now() >= deadline_) wait();  // one last look, then the error
    return !pending_;
  }

  void wait() override {
    if (!pending_) return;
    int64_t bytes = 0;
    for (const Pending::Item& item : pending_->items) bytes += item.done ? 0 : item.bytes;
    comm_.wait(pending_, deadline_, timeout_, expected_time(bytes));
    pending_.reset();
  }

 private:
  MpiCommunicator& comm_;
  PendingPtr pending_;  // null once complete
  Clock::time_point deadline_;
  Seconds timeout_;
  int exceptions_;
};

std::vector<CollectiveHeader> MpiCommunicator::gather_headers(const CollectiveHeader& mine, const at::Tensor&,
                                                              OpLabel label) {
  const auto pending = std::make_shared<Pending>();
  Pending& p = *pending;
  p.label = label;
  p.collective = "waiting for all ranks";
  p.mine = mine;
  p.headers.resize(static_cast<size_t>(size_));
  p.headers[static_cast<size_t>(rank_)] = mine;
  const auto deadline = deadline_of(timeout_);
  const int bytes = static_cast<int>(sizeof(CollectiveHeader));
  start(pending, [&] {
    if (size_ <= kDirectHeaders) {
      for (const bool is_send : {false, true}) {
        for (int i = 1; i < size_; ++i) {
          const int peer = (rank_ + i) % size_;
          MPI_Request request = MPI_REQUEST_NULL;
          const int code =
              is_send ? MPI_Isend(&p.mine, bytes, MPI_BYTE, peer, 0, control_, &request)
                      : MPI_Irecv(&p.headers[static_cast<size_t>(peer)], bytes, MPI_BYTE, peer, 0, control_, &request);
          post(p, request, {at::Tensor(), peer, is_send, bytes, 0, false, {}}, code);
        }
      }
    } else {
      MPI_Request request = MPI_REQUEST_NULL;
      const int code = MPI_Iallgather(&p.mine, bytes, MPI_BYTE, p.headers.data(), bytes, MPI_BYTE, control_, &request);
      post(p, request, {at::Tensor(), -1, false, bytes, 0, false, {}}, code);
    }
  });
  wait(pending, deadline, timeout_, expected_time(0));
  return p.headers;
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
      post(*pending, request, {a, -1, false, pending->items.empty() ? bytes : 0, 0, false, b}, code);
    });
  });
  return std::make_unique<MpiWork>(*this, pending, deadline);
}

std::unique_ptr<Work> MpiCommunicator::start_exchange(const std::vector<Message>& sends,
                                                      const std::vector<Message>& receives, OpLabel label) {
  const auto pending = std::make_shared<Pending>();
  pending->label = label;
  const auto deadline = deadline_of(timeout_);
  const auto post_message = [&](const Message& message, bool is_send) {
    const int64_t sequence = (is_send ? sent_ : received_)[static_cast<size_t>(message.peer)]++;
    const auto bytes = static_cast<int64_t>(message.tensor.nbytes());
    if (bytes == 0) return;  // counted all the same: a peer that does expect data finds the gap
    const int tag = tags_.of(sequence, message.tensor.scalar_type());
    MPI_Request request = MPI_REQUEST_NULL;
    int code = MPI_SUCCESS;
    if (is_send) {
      const ByteType type = bytes_of(message.tensor.nbytes());
      code = MPI_Isend(message.tensor.const_data_ptr(), type.count(), type.type(), message.peer, tag, data_, &request);
    }
    post(*pending, request, {message.tensor, message.peer, is_send, bytes, tag, false, {}}, code);
    if (!is_send) {
      auto& queue = expected_[static_cast<size_t>(message.peer)];
      if (queue.empty()) expecting_.push_back(message.peer);
      queue.emplace_back(pending, pending->items.size() - 1);
    }
  };
  start(pending, [&] {
    for (const Message& message : receives) post_message(message, false);
    for (const Message& message : sends) post_message(message, true);
    match_receives();
  });
  return std::make_unique<MpiWork>(*this, pending, deadline);
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
