// The MPI backend. Only non-blocking calls and Testsome, polled against the deadline; split alone blocks, under a
// watchdog and only after all ranks are known to have come.
//
// - A point-to-point message is received with MPI_ANY_TAG from a named rank: MPI keeps the order of messages between
//   two ranks, and the tag that arrives says which message of that pair it is and of what dtype, so that ranks out of
//   step are told apart instead of waiting for ever for a tag that never comes.
// - Before a collective every rank sends its header to every other (up to kDirectHeaders ranks; an all-gather beyond),
//   so that a missing rank can be named and ranks that disagree all know it before any data moves.
// - No progress thread: progress() and the waits move data. Waits spin for about the expected time, then sleep.
#include <ATen/ops/empty.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <deque>
#include <exception>
#include <thread>
#include <utility>

#include "comm/checks.h"
#include "comm/mpi/mpi_internal.h"
#include "comm/watchdog.h"
#include "common/error.h"

namespace annulus::mpi_internal {
namespace {

using namespace comm_internal;
using Clock = std::chrono::steady_clock;

constexpr int kDirectHeaders = 32;
constexpr int kDtypeBits = 6;

Clock::time_point deadline_of(Seconds timeout) {
  const double seconds = std::clamp(timeout.count(), 0.0, 365.0 * 86400);
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(Seconds(seconds));
}

// Calls done() until it is true or the deadline has passed. Spins for `expected`, giving way to other threads, then
// sleeps for an eighth of the time waited so far, at most a millisecond, with a burst of calls in between: a late
// message is noticed within an eighth of its lateness, and a waiting rank leaves its core to the others.
template <typename Done>
bool poll_until(Done done, Clock::time_point deadline, Seconds expected) {
  constexpr int kBurst = 16;
  const auto start = Clock::now();
  for (;;) {
    for (int i = 0; i < kBurst; ++i) {
      if (done()) return true;
    }
    const auto now = Clock::now();
    if (now >= deadline) return done();
    const Seconds waited = now - start;
    if (waited < expected) {
      sched_yield();
      continue;
    }
    const Seconds pause(std::clamp((waited - expected).count() / 8, 10e-6, 1e-3));
    std::this_thread::sleep_for(std::min<Seconds>(pause, deadline - now));
  }
}

// The time a transfer on this host takes when all goes well, 20 us and 8 GB/s. Not longer: what has not come by then
// waits for a rank that still computes, perhaps for this core.
Seconds expected_time(int64_t bytes) { return Seconds(20e-6 + static_cast<double>(bytes) / 8e9); }

// `bytes` bytes as (count, type): MPI counts are 31 bits. Freed at once after posting, as MPI allows.
class ByteType {
 public:
  ByteType(int64_t bytes, int64_t piece) {
    if (bytes <= piece) {
      count_ = static_cast<int>(bytes);
      return;
    }
    MPI_Datatype block = MPI_DATATYPE_NULL;
    check_mpi(MPI_Type_contiguous(static_cast<int>(piece), MPI_BYTE, &block), "MPI_Type_contiguous");
    const std::array<int, 2> lengths{static_cast<int>(bytes / piece), static_cast<int>(bytes % piece)};
    const std::array<MPI_Aint, 2> offsets{0, static_cast<MPI_Aint>(bytes / piece * piece)};
    const std::array<MPI_Datatype, 2> types{block, MPI_BYTE};
    const int code = MPI_Type_create_struct(2, lengths.data(), offsets.data(), types.data(), &type_);
    MPI_Type_free(&block);
    check_mpi(code, "MPI_Type_create_struct");
    owned_ = true;
    check_mpi(MPI_Type_commit(&type_), "MPI_Type_commit");
  }
  ~ByteType() {
    if (owned_) MPI_Type_free(&type_);
  }
  ByteType(const ByteType&) = delete;
  ByteType& operator=(const ByteType&) = delete;
  int count() const { return count_; }
  MPI_Datatype type() const { return type_; }

 private:
  int count_ = 1;
  MPI_Datatype type_ = MPI_BYTE;
  bool owned_ = false;
};

MPI_Datatype reducible_type(at::ScalarType dtype) {
  if (dtype == at::kFloat) return MPI_FLOAT;
  if (dtype == at::kDouble) return MPI_DOUBLE;
  return MPI_INT64_T;
}

MPI_Op mpi_op(ReduceOp op) { return op == ReduceOp::kSum ? MPI_SUM : op == ReduceOp::kMax ? MPI_MAX : MPI_MIN; }

// What MPI may still read or write. When its wait fails it is never freed.
struct Pending {
  struct Item {
    at::Tensor tensor;
    int peer = -1;  // -1: a collective
    bool is_send = false;
    int64_t bytes = 0;
    int tag = 0;
    bool done = false;
    at::Tensor extra;  // a collective's second buffer
  };
  std::vector<MPI_Request> requests;  // null: a receive whose message has not come, or done
  std::vector<Item> items;            // beside requests
  size_t open = 0;                    // items not done
  OpLabel label;
  std::string mismatch;  // a message that came was not the one expected
  std::vector<CollectiveHeader> headers;
  CollectiveHeader mine;
  // Scratch of Testsome.
  std::vector<int> indices;
  std::vector<MPI_Status> statuses;
};
using PendingPtr = std::shared_ptr<Pending>;

class MpiCommunicator final : public Communicator {
 public:
  MpiCommunicator(std::shared_ptr<MpiRuntime> runtime, MPI_Comm data, MPI_Comm control, int rank, int size)
      : Communicator(rank, size),
        runtime_(std::move(runtime)),
        data_(data),
        control_(control),
        sent_(static_cast<size_t>(size), 0),
        received_(static_cast<size_t>(size), 0),
        expected_(static_cast<size_t>(size)) {
    void* bound = nullptr;
    int found = 0;
    check_mpi(MPI_Comm_get_attr(data_, MPI_TAG_UB, static_cast<void*>(&bound), &found), "MPI_Comm_get_attr");
    const int64_t upper = found != 0 ? *static_cast<int*>(bound) : 32767;
    int bits = 15;  // what MPI guarantees
    while (bits < 30 && (int64_t{2} << bits) - 1 <= upper) ++bits;
    sequence_mask_ = (int64_t{1} << (bits - kDtypeBits)) - 1;
  }

  ~MpiCommunicator() override {
    // Freeing is collective: not when the others may never come.
    if (!dead_.empty() || std::uncaught_exceptions() > 0) return;
    std::lock_guard<std::mutex> lock(runtime_->mutex());
    int ended = 0;
    if (MPI_Finalized(&ended) != MPI_SUCCESS || ended != 0) return;
    MPI_Comm_free(&control_);
    MPI_Comm_free(&data_);
  }

  std::string_view backend() const override { return "mpi"; }

  std::unique_ptr<Work> exchange(const std::vector<Message>& sends, const std::vector<Message>& receives,
                                 OpLabel label) override;

  void all_reduce(at::Tensor& tensor, ReduceOp op, OpLabel label) override {
    check_tensor(tensor, at::kCPU, backend(), "tensor", label);
    check_reducible(tensor, backend(), label);
    agree(Collective::kAllReduce, &tensor, static_cast<int>(op), -1, label);
    const int64_t step = std::max<int64_t>(1, piece_bytes() / tensor.element_size());
    char* data = static_cast<char*>(tensor.mutable_data_ptr());
    for (int64_t begin = 0; size_ > 1 && begin < tensor.numel(); begin += step) {
      const int count = static_cast<int>(std::min(step, tensor.numel() - begin));
      run("all_reduce", label, {tensor}, [&](MPI_Request* request) {
        return MPI_Iallreduce(MPI_IN_PLACE, data + begin * tensor.element_size(), count,
                              reducible_type(tensor.scalar_type()), mpi_op(op), data_, request);
      });
    }
    count(tensor.nbytes());
  }

  void all_gather(at::Tensor& out, const at::Tensor& in, OpLabel label) override {
    check_tensor(in, at::kCPU, backend(), "input", label);
    check_tensor(out, at::kCPU, backend(), "output", label);
    check_gather_shapes(out, "output", in, "input", size_, label);
    agree(Collective::kAllGather, &in, -1, -1, label);
    if (in.nbytes() > 0) {
      const ByteType type = bytes_of(in.nbytes());
      run("all_gather", label, {in, out}, [&](MPI_Request* request) {
        return MPI_Iallgather(in.const_data_ptr(), type.count(), type.type(), out.mutable_data_ptr(), type.count(),
                              type.type(), data_, request);
      });
    }
    count(in.nbytes());
  }

  void reduce_scatter(at::Tensor& out, const at::Tensor& in, OpLabel label) override {
    check_tensor(in, at::kCPU, backend(), "input", label);
    check_tensor(out, at::kCPU, backend(), "output", label);
    check_reducible(in, backend(), label);
    check_gather_shapes(in, "input", out, "output", size_, label);
    agree(Collective::kReduceScatter, &in, static_cast<int>(ReduceOp::kSum), -1, label);
    const int64_t n = out.numel();
    const int64_t width = out.element_size();
    const MPI_Datatype type = reducible_type(in.scalar_type());
    const char* from = static_cast<const char*>(in.const_data_ptr());
    char* to = static_cast<char*>(out.mutable_data_ptr());
    const int64_t step = std::max<int64_t>(1, piece_bytes() / width);
    if (n > 0 && n <= step) {
      run("reduce_scatter", label, {in, out}, [&](MPI_Request* request) {
        return MPI_Ireduce_scatter_block(from, to, static_cast<int>(n), type, MPI_SUM, data_, request);
      });
    } else {
      for (int root = 0; root < size_; ++root) {
        for (int64_t begin = 0; begin < n; begin += step) {
          run("reduce_scatter", label, {in, out}, [&](MPI_Request* request) {
            return MPI_Ireduce(from + (root * n + begin) * width, to + begin * width,
                               static_cast<int>(std::min(step, n - begin)), type, MPI_SUM, root, data_, request);
          });
        }
      }
    }
    count(out.nbytes());
  }

  void broadcast(at::Tensor& tensor, int root, OpLabel label) override {
    check_tensor(tensor, at::kCPU, backend(), "tensor", label);
    check_root(root, size_, label);
    agree(Collective::kBroadcast, &tensor, -1, root, label);
    if (tensor.nbytes() > 0) {
      const ByteType type = bytes_of(tensor.nbytes());
      run("broadcast", label, {tensor}, [&](MPI_Request* request) {
        return MPI_Ibcast(tensor.mutable_data_ptr(), type.count(), type.type(), root, data_, request);
      });
    }
    if (rank_ == root) {
      stats_.messages_sent += size_ - 1;
      stats_.bytes_sent += (size_ - 1) * static_cast<int64_t>(tensor.nbytes());
    } else {
      stats_.messages_received += 1;
      stats_.bytes_received += static_cast<int64_t>(tensor.nbytes());
    }
  }

  // Nobody has all headers before everybody has come.
  void barrier(OpLabel label) override { agree(Collective::kBarrier, nullptr, -1, -1, label); }

  std::unique_ptr<Communicator> split(int color, int key) override {
    const OpLabel label{"split", calls_};
    agree(Collective::kSplit, nullptr, -1, -1, label);
    const Seconds timeout = timeout_;
    const int rank = rank_;
    Watchdog watchdog(timeout, [timeout, rank, label] {
      return "[comm] " + where(label) + ": rank " + std::to_string(rank) + " waited in MPI_Comm_split for more than " +
             describe_seconds(timeout.count()) + ": another rank is stopped or gone";
    });
    MPI_Comm data = MPI_COMM_NULL;
    {
      std::lock_guard<std::mutex> lock(runtime_->mutex());
      check_mpi(MPI_Comm_split(data_, color < 0 ? MPI_UNDEFINED : color, key, &data), "MPI_Comm_split");
    }
    if (data == MPI_COMM_NULL) return nullptr;
    std::unique_ptr<Communicator> out = make_mpi_communicator(runtime_, data);
    out->set_timeout(timeout_);
    return out;
  }

  void progress() override {
    if (!dead_.empty()) return;
    int flag = 0;
    std::lock_guard<std::mutex> lock(runtime_->mutex());
    // Never matches, and so always moves everything along.
    MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_SELF, &flag, MPI_STATUS_IGNORE);
    match_receives();
  }

 private:
  friend class MpiWork;

  int64_t piece_bytes() const { return runtime_->options().max_piece_bytes; }

  ByteType bytes_of(size_t bytes) const { return ByteType(static_cast<int64_t>(bytes), piece_bytes()); }

  int tag_of(int64_t sequence, at::ScalarType dtype) const {
    return static_cast<int>((sequence & sequence_mask_) << kDtypeBits) | static_cast<int>(dtype);
  }

  std::string describe_tag(int tag) const {
    return "message " + std::to_string(tag >> kDtypeBits) + " between these ranks, " +
           dtype_name(static_cast<at::ScalarType>(tag & ((1 << kDtypeBits) - 1)));
  }

  void count(size_t bytes_each) {
    const int64_t messages = size_ - 1;
    stats_.messages_sent += messages;
    stats_.messages_received += messages;
    stats_.bytes_sent += messages * static_cast<int64_t>(bytes_each);
    stats_.bytes_received += messages * static_cast<int64_t>(bytes_each);
  }

  void check_alive(OpLabel label) const {
    if (!dead_.empty()) throw_comm(label, "this communicator is dead since an earlier failure: " + dead_);
  }

  // After a failure MPI may still use the buffers of `pending`: they are leaked, and MPI is not finalized.
  void die(const PendingPtr& pending, const std::string& why) {
    kill(why);
    [[maybe_unused]] const auto* leaked = new PendingPtr(pending);
  }

  void kill(const std::string& why) {
    if (!dead_.empty()) return;
    dead_ = why;
    [[maybe_unused]] const auto* leaked = new auto(std::move(expected_));
    expected_.clear();
    expected_.resize(static_cast<size_t>(size_));
    expecting_.clear();
    runtime_->abandon();
  }

  std::string describe(const Pending::Item& item) const {
    if (item.peer < 0) return "a collective";
    return (item.is_send ? "sending " : "receiving ") + std::to_string(item.bytes) +
           (item.is_send ? " bytes to rank " : " bytes from rank ") + std::to_string(item.peer);
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
          pending->mismatch = "rank " + std::to_string(item.peer) + " sent " + std::to_string(bytes) + " bytes (" +
                              describe_tag(status.MPI_TAG) + "), but rank " + std::to_string(rank_) + " expected " +
                              std::to_string(item.bytes) + " bytes (" + describe_tag(item.tag) + ", " +
                              describe_shape(item.tensor.sizes()) + ")";
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
    if (dead_.empty()) {
      std::lock_guard<std::mutex> lock(runtime_->mutex());
      try {
        match_receives();
        if (dead_.empty()) test_requests(p);
      } catch (const Error& e) {
        die(pending, where(label) + ": " + e.what());
        throw;
      }
    }
    if (!p.mismatch.empty()) throw_mismatch(label, p.mismatch);
    if (!dead_.empty()) {
      die(pending, dead_);
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
        throw_comm(p.label, describe(item) + " failed: " + mpi_error_text(error));
      }
      item.done = true;
      --p.open;
    }
  }

  // Waits for all of pending. `what` is used for collectives.
  void wait(const PendingPtr& pending, const char* what, OpLabel label, Clock::time_point deadline, Seconds timeout,
            Seconds expected) {
    const auto start = Clock::now();
    const bool done = poll_until([&] { return test(pending, label); }, deadline, expected);
    stats_.wait_seconds += Seconds(Clock::now() - start).count();
    if (done) return;
    const std::string why = describe_unfinished(*pending, what) + " within " + describe_seconds(timeout.count());
    die(pending, where(label) + ": " + why);
    throw_comm(label, why);
  }

  std::string describe_unfinished(const Pending& pending, const char* what) const {
    std::vector<int> peers;
    const Pending::Item* first = nullptr;
    for (const Pending::Item& item : pending.items) {
      if (item.done) continue;
      // A message not received says more than one not sent: its sender has not come.
      if (first == nullptr || (first->is_send && !item.is_send)) first = &item;
      if (item.peer >= 0 && !item.is_send) peers.push_back(item.peer);
    }
    if (what != nullptr) {
      std::sort(peers.begin(), peers.end());
      peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
      if (peers.empty()) return std::string(what) + ": another rank did not finish";
      return std::string(what) + ": " + describe_ranks(peers) + " did not come";
    }
    std::string text = describe(*first) + ": not done";
    const auto open =
        std::count_if(pending.items.begin(), pending.items.end(), [](const Pending::Item& item) { return !item.done; });
    if (open > 1) text += " (nor " + std::to_string(open - 1) + " more transfers)";
    return text;
  }

  // All ranks show what they are about to do. Raises the same Error(kMismatch) on all when it is not the same.
  void agree(Collective collective, const at::Tensor* tensor, int op, int root, OpLabel label) {
    check_alive(label);
    auto pending = std::make_shared<Pending>();
    Pending& p = *pending;
    p.mine = make_header(collective, calls_++, tensor, op, root, label);
    p.headers.resize(static_cast<size_t>(size_));
    p.headers[static_cast<size_t>(rank_)] = p.mine;
    const auto deadline = deadline_of(timeout_);
    const int bytes = static_cast<int>(sizeof(CollectiveHeader));
    start(pending, [&] {
      if (size_ <= kDirectHeaders) {
        for (const bool is_send : {false, true}) {
          for (int i = 1; i < size_; ++i) {
            const int peer = (rank_ + i) % size_;
            MPI_Request request = MPI_REQUEST_NULL;
            const int code = is_send ? MPI_Isend(&p.mine, bytes, MPI_BYTE, peer, 0, control_, &request)
                                     : MPI_Irecv(&p.headers[static_cast<size_t>(peer)], bytes, MPI_BYTE, peer, 0,
                                                 control_, &request);
            post(p, request, {at::Tensor(), peer, is_send, bytes, 0, false, {}}, code, label);
          }
        }
      } else {
        MPI_Request request = MPI_REQUEST_NULL;
        const int code =
            MPI_Iallgather(&p.mine, bytes, MPI_BYTE, p.headers.data(), bytes, MPI_BYTE, control_, &request);
        post(p, request, {at::Tensor(), -1, false, bytes, 0, false, {}}, code, label);
      }
    });
    wait(pending, "waiting for all ranks", label, deadline, timeout_, expected_time(0));
    require_same_headers(p.headers, label);
  }

  // Records a request that a non-blocking call has started, or has failed to.
  void post(Pending& p, MPI_Request request, Pending::Item item, int code, OpLabel label) {
    if (code != MPI_SUCCESS) throw_comm(label, describe(item) + " could not be started: " + mpi_error_text(code));
    p.requests.push_back(request);
    p.items.push_back(std::move(item));
    p.label = label;
    ++p.open;
  }

  // Runs body, which posts to pending, under the lock. What was posted before a failure still belongs to MPI.
  template <typename Body>
  void start(const PendingPtr& pending, Body body) {
    try {
      std::lock_guard<std::mutex> lock(runtime_->mutex());
      body();
    } catch (const Error& e) {
      die(pending, e.what());
      throw;
    }
  }

  // Starts one non-blocking collective and waits for it. `keep`: its one or two buffers.
  template <typename Begin>
  void run(const char* what, OpLabel label, std::vector<at::Tensor> keep, Begin begin) {
    auto pending = std::make_shared<Pending>();
    const auto deadline = deadline_of(timeout_);
    int64_t bytes = 0;
    for (const at::Tensor& tensor : keep) bytes += static_cast<int64_t>(tensor.nbytes());
    start(pending, [&] {
      MPI_Request request = MPI_REQUEST_NULL;
      const int code = begin(&request);
      post(*pending, request, {keep.front(), -1, false, bytes, 0, false, keep.back()}, code, label);
    });
    wait(pending, what, label, deadline, timeout_, expected_time(bytes));
  }

  std::shared_ptr<MpiRuntime> runtime_;
  MPI_Comm data_;
  MPI_Comm control_;
  std::vector<int64_t> sent_;  // messages so far, by peer
  std::vector<int64_t> received_;
  // Receives whose message has not come, in order, by peer; and the peers that have any.
  std::vector<std::deque<std::pair<PendingPtr, size_t>>> expected_;
  std::vector<int> expecting_;
  int64_t sequence_mask_ = 0;
  int64_t calls_ = 0;
  std::string dead_;  // why
};

class MpiWork final : public Work {
 public:
  MpiWork(MpiCommunicator& comm, PendingPtr pending, OpLabel label, Clock::time_point deadline)
      : comm_(comm),
        pending_(std::move(pending)),
        label_(label),
        deadline_(deadline),
        timeout_(comm.timeout()),
        exceptions_(std::uncaught_exceptions()) {}

  ~MpiWork() override {
    if (!pending_) return;
    if (std::uncaught_exceptions() > exceptions_) {
      comm_.die(pending_, where(label_) + ": abandoned after another error");
      return;
    }
    try {
      wait();
    } catch (const std::exception& e) {
      std::fprintf(stderr, "rank %d: %s\n", comm_.rank(), e.what());
    }
  }

  bool test() override {
    if (!pending_) return true;
    if (comm_.test(pending_, label_)) {
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
    comm_.wait(pending_, nullptr, label_, deadline_, timeout_, expected_time(bytes));
    pending_.reset();
  }

 private:
  MpiCommunicator& comm_;
  PendingPtr pending_;  // null once complete or failed
  OpLabel label_;
  Clock::time_point deadline_;
  Seconds timeout_;
  int exceptions_;
};

std::unique_ptr<Work> MpiCommunicator::exchange(const std::vector<Message>& sends, const std::vector<Message>& receives,
                                                OpLabel label) {
  check_alive(label);
  check_messages(sends, receives, size_, at::kCPU, backend(), label);
  auto pending = std::make_shared<Pending>();
  const auto deadline = deadline_of(timeout_);
  const auto post_message = [&](const Message& message, bool is_send) {
    const int64_t sequence = (is_send ? sent_ : received_)[static_cast<size_t>(message.peer)]++;
    const auto bytes = static_cast<int64_t>(message.tensor.nbytes());
    if (bytes == 0) return;  // counted all the same: a peer that does expect data finds the gap
    const int tag = tag_of(sequence, message.tensor.scalar_type());
    MPI_Request request = MPI_REQUEST_NULL;
    int code = MPI_SUCCESS;
    if (is_send) {
      const ByteType type = bytes_of(message.tensor.nbytes());
      code = MPI_Isend(message.tensor.const_data_ptr(), type.count(), type.type(), message.peer, tag, data_, &request);
    }
    post(*pending, request, {message.tensor, message.peer, is_send, bytes, tag, false, {}}, code, label);
    if (!is_send) {
      auto& queue = expected_[static_cast<size_t>(message.peer)];
      if (queue.empty()) expecting_.push_back(message.peer);
      queue.emplace_back(pending, pending->items.size() - 1);
    }
    (is_send ? stats_.messages_sent : stats_.messages_received) += 1;
    (is_send ? stats_.bytes_sent : stats_.bytes_received) += bytes;
  };
  start(pending, [&] {
    for (const Message& message : receives) post_message(message, false);
    for (const Message& message : sends) post_message(message, true);
    match_receives();
  });
  return std::make_unique<MpiWork>(*this, std::move(pending), label, deadline);
}

}  // namespace

std::unique_ptr<Communicator> make_mpi_communicator(std::shared_ptr<MpiRuntime> runtime, MPI_Comm data) {
  std::lock_guard<std::mutex> lock(runtime->mutex());
  int rank = 0;
  int size = 1;
  MPI_Comm control = MPI_COMM_NULL;
  check_mpi(MPI_Comm_rank(data, &rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(data, &size), "MPI_Comm_size");
  check_mpi(MPI_Comm_dup(data, &control), "MPI_Comm_dup");
  check_mpi(MPI_Comm_set_errhandler(data, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check_mpi(MPI_Comm_set_errhandler(control, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return std::make_unique<MpiCommunicator>(runtime, data, control, rank, size);
}

}  // namespace annulus::mpi_internal
