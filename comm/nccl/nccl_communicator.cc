// The NCCL backend. The communicator of NCCL is non-blocking: no call of it keeps the host waiting beyond a deadline.
//
// Threads. One mutex guards NCCL's handle, the list of operations on the device and the communicator that carries
// headers; the caller's thread and the watching thread both use them, and neither blocks while holding it for longer
// than a deadline. The host communicator is the caller's alone. That both may be inside MPI at once is MPI's own lock's
// affair (MpiRuntime has one for the process, held for one call at a time).
//
// Memory. Transfers run on this communicator's stream, between two events:
// - `ready`, recorded on the caller's stream at the start, which this stream waits for: a receive buffer is not written
//   before the kernels that read what lay there before it, and nothing is sent before it is computed;
// - `done`, recorded on this stream, which the caller's stream waits for in Work::wait(): nothing that the caller
//   issues afterwards, reading, writing or handing the memory to another tensor, comes before the transfer's end.
// Tensors are held until then (test() and the watching thread let go earlier, when the device says it is done). The
// allocator hands freed memory out again in the order of the stream that it was taken on, so after wait() on the stream
// that started the transfer there is nothing left to keep; recording the stream with the allocator as well would hold
// memory until the host sees the transfer done, and the host runs a whole step ahead. Only when another stream waits
// does the allocator have to know.
#include "comm/nccl/nccl_communicator.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <list>
#include <mutex>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>

#include "comm/checks.h"
#include "comm/watchdog.h"
#include "common/error.h"

namespace annulus {
namespace {

using namespace comm_internal;
using Clock = std::chrono::steady_clock;

constexpr auto kWatchInterval = std::chrono::milliseconds(20);
// ncclCommAbort waits for the device to notice; should the device be lost as well, the process ends.
constexpr Seconds kAbortTimeout{30};
// How long headers may be behind an error of NCCL before it is believed to be no mismatch.
constexpr Seconds kHeadersBehind{0.5};

Clock::time_point deadline_of(Seconds timeout) {
  const double seconds = std::clamp(timeout.count(), 0.0, 365.0 * 86400);
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(Seconds(seconds));
}

void check_cuda(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  throw Error(ErrorKind::kComm, "comm", std::string(call) + " failed: " + cudaGetErrorString(code));
}

[[noreturn]] void fail_comm(const std::string& message) { throw Error(ErrorKind::kComm, "comm", message); }

// Without "[comm] ", to be said within another message of this room.
std::string plain(const Error& error) {
  const std::string text = error.what(), room = "[comm] ";
  return text.rfind(room, 0) == 0 ? text.substr(room.size()) : text;
}

std::string describe_nccl(ncclResult_t code, ncclComm_t comm) {
  const char* last = ncclGetLastError(comm);
  return ncclGetErrorString(code) + (last != nullptr && *last != '\0' ? " (" + std::string(last) + ")" : "");
}

// In progress is no failure: the caller polls the communicator's state afterwards.
void check_nccl(ncclResult_t code, const char* call, ncclComm_t comm) {
  if (code == ncclSuccess || code == ncclInProgress) return;
  fail_comm(std::string(call) + " failed: " + describe_nccl(code, comm));
}

class Event {
 public:
  Event() { check_cuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreateWithFlags"); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(cudaStream_t stream) { check_cuda(cudaEventRecord(event_, stream), "cudaEventRecord"); }
  void block(cudaStream_t stream) const { check_cuda(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent"); }
  // cudaSuccess, cudaErrorNotReady or what the device failed with. The runtime keeps "not ready" as the thread's last
  // error, where the next kernel launch of LibTorch would find it and raise.
  cudaError_t query() const {
    const cudaError_t code = cudaEventQuery(event_);
    if (code == cudaErrorNotReady) cudaGetLastError();
    return code;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

ncclDataType_t nccl_type(at::ScalarType dtype) {
  if (dtype == at::kFloat) return ncclFloat32;
  if (dtype == at::kDouble) return ncclFloat64;
  return ncclInt64;
}

ncclRedOp_t nccl_op(ReduceOp op) { return op == ReduceOp::kSum ? ncclSum : op == ReduceOp::kMax ? ncclMax : ncclMin; }

// What travels beside a message of an exchange.
constexpr int64_t kHeaderWords = 3;  // number of the message between the two ranks, dtype, bytes

// One exchange or collective on the device, until it is known to be complete.
struct Operation {
  Event ready, done;        // see the head of this file
  std::string label;        // "attention forward, step 2"
  std::string description;  // "receiving 4096 bytes from rank 3"
  Seconds timeout{0};
  // From when the device gets to it: the host may have issued hours of work before it.
  std::optional<Clock::time_point> deadline;
  std::vector<at::Tensor> tensors;                 // kept from the allocator
  std::optional<c10::cuda::CUDAStream> issued_on;  // the caller's stream
  bool on_device = false;                          // done has been recorded
  bool complete = false;
  // An exchange's headers.
  std::unique_ptr<Work> headers;
  struct Expected {
    at::Tensor came;
    int peer = 0;
    int64_t sequence = 0;
    at::ScalarType dtype = at::kByte;
    int64_t bytes = 0;
  };
  std::vector<Expected> expected;
  std::vector<at::Tensor> sent_headers;
};

class NcclCommunicator final : public Communicator {
 public:
  // host and headers: over the same ranks, owned. Used by different threads.
  NcclCommunicator(std::unique_ptr<Communicator> host, std::unique_ptr<Communicator> headers,
                   const NcclOptions& options)
      : Communicator(host->rank(), host->size()),
        host_(std::move(host)),
        headers_(std::move(headers)),
        options_(options),
        stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, static_cast<c10::DeviceIndex>(options.device))),
        sent_(static_cast<size_t>(size_), 0),
        received_(static_cast<size_t>(size_), 0) {
    const OpLabel label{"starting NCCL", 0};
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(options.device));
    // Rank 0's id lets the others find it; without one it says why.
    ncclUniqueId unique{};
    std::string word;
    if (rank_ == 0) {
      const ncclResult_t code = ncclGetUniqueId(&unique);
      word = code == ncclSuccess ? std::string(unique.internal, sizeof unique.internal)
                                 : "ncclGetUniqueId failed: " + describe_nccl(code, nullptr);
    }
    word = all_gather_text(*host_, word, label).front();
    if (word.size() != sizeof unique.internal) throw_comm(label, word);
    std::memcpy(unique.internal, word.data(), word.size());
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    try {
      check_nccl(ncclCommInitRankConfig(&comm_, size_, unique, rank_, &config), "ncclCommInitRankConfig", nullptr);
      await(options.timeout);
    } catch (const Error& e) {
      abort();
      throw_comm(label, "waiting for all ranks in ncclCommInitRankConfig: " + plain(e));
    }
    watcher_ = std::thread([this] { watch(); });
  }

  ~NcclCommunicator() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    if (watcher_.joinable()) watcher_.join();
    std::lock_guard<std::mutex> lock(mutex_);
    if (comm_ == nullptr) return;
    if (failed_.empty() && std::uncaught_exceptions() == 0) {
      try {
        const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(options_.device));
        check_nccl(ncclCommFinalize(comm_), "ncclCommFinalize", comm_);
        await(timeout_);
        check_nccl(ncclCommDestroy(comm_), "ncclCommDestroy", comm_);
        comm_ = nullptr;
        return;
      } catch (const std::exception& e) {
        std::fprintf(stderr, "rank %d: ending NCCL: %s\n", rank_, e.what());
      }
    }
    fail(ErrorKind::kComm, "closed");
  }

  std::string_view backend() const override { return "nccl"; }
  Communicator& host() override {
    host_->set_timeout(timeout_);
    return *host_;
  }

  std::unique_ptr<Work> exchange(const std::vector<Message>& sends, const std::vector<Message>& receives,
                                 OpLabel label) override;

  void all_reduce(at::Tensor& tensor, ReduceOp op, OpLabel label) override {
    check(tensor, "tensor", label);
    check_reducible(tensor, backend(), label);
    agree(Collective::kAllReduce, &tensor, static_cast<int>(op), -1, label);
    collective("all_reduce", label, {tensor}, [&](cudaStream_t stream) {
      return ncclAllReduce(tensor.const_data_ptr(), tensor.mutable_data_ptr(), static_cast<size_t>(tensor.numel()),
                           nccl_type(tensor.scalar_type()), nccl_op(op), comm_, stream);
    });
    count(tensor.nbytes());
  }

  void all_gather(at::Tensor& out, const at::Tensor& in, OpLabel label) override {
    check(in, "input", label);
    check(out, "output", label);
    check_gather_shapes(out, "output", in, "input", size_, label);
    agree(Collective::kAllGather, &in, -1, -1, label);
    collective("all_gather", label, {out, in}, [&](cudaStream_t stream) {
      return ncclAllGather(in.const_data_ptr(), out.mutable_data_ptr(), in.nbytes(), ncclUint8, comm_, stream);
    });
    count(in.nbytes());
  }

  void reduce_scatter(at::Tensor& out, const at::Tensor& in, OpLabel label) override {
    check(in, "input", label);
    check(out, "output", label);
    check_reducible(in, backend(), label);
    check_gather_shapes(in, "input", out, "output", size_, label);
    agree(Collective::kReduceScatter, &in, static_cast<int>(ReduceOp::kSum), -1, label);
    collective("reduce_scatter", label, {out, in}, [&](cudaStream_t stream) {
      return ncclReduceScatter(in.const_data_ptr(), out.mutable_data_ptr(), static_cast<size_t>(out.numel()),
                               nccl_type(in.scalar_type()), ncclSum, comm_, stream);
    });
    count(out.nbytes());
  }

  void broadcast(at::Tensor& tensor, int root, OpLabel label) override {
    check(tensor, "tensor", label);
    check_root(root, size_, label);
    agree(Collective::kBroadcast, &tensor, -1, root, label);
    collective("broadcast", label, {tensor}, [&](cudaStream_t stream) {
      return ncclBroadcast(tensor.const_data_ptr(), tensor.mutable_data_ptr(), tensor.nbytes(), ncclUint8, root, comm_,
                           stream);
    });
    if (rank_ == root) {
      stats_.messages_sent += size_ - 1;
      stats_.bytes_sent += (size_ - 1) * static_cast<int64_t>(tensor.nbytes());
    } else {
      stats_.messages_received += 1;
      stats_.bytes_received += static_cast<int64_t>(tensor.nbytes());
    }
  }

  void barrier(OpLabel label) override { agree(Collective::kBarrier, nullptr, -1, -1, label); }

  std::unique_ptr<Communicator> split(int color, int key) override {
    agree(Collective::kSplit, nullptr, -1, -1, {"split", calls_});
    host_->set_timeout(timeout_);
    std::unique_ptr<Communicator> host = host_->split(color, key);
    if (!host) return nullptr;
    NcclOptions options = options_;
    options.timeout = timeout_;
    std::unique_ptr<Communicator> headers = host->split(0, host->rank());
    auto out = std::make_unique<NcclCommunicator>(std::move(host), std::move(headers), options);
    out->set_timeout(timeout_);
    return out;
  }

  void progress() override {
    std::lock_guard<std::mutex> lock(mutex_);
    check_alive({"progress", 0});
  }

 private:
  friend class NcclWork;

  void check(const at::Tensor& tensor, const char* role, OpLabel label) const {
    check_tensor(tensor, at::kCUDA, backend(), role, label);
    if (tensor.get_device() == options_.device) return;
    throw Error(ErrorKind::kPlan, "comm",
                where(label) + ": the " + role + " is on " + tensor.device().str() + ", but rank " +
                    std::to_string(rank_) + " communicates from cuda:" + std::to_string(options_.device));
  }

  void count(size_t bytes_each) {
    const int64_t messages = size_ - 1;
    stats_.messages_sent += messages;
    stats_.messages_received += messages;
    stats_.bytes_sent += messages * static_cast<int64_t>(bytes_each);
    stats_.bytes_received += messages * static_cast<int64_t>(bytes_each);
  }

  // Raises what has struck the device meanwhile. The mutex is held.
  void check_alive(OpLabel label) {
    look_after();
    if (failed_.empty()) return;
    const bool first = !reported_;
    reported_ = true;
    if (first) throw Error(failed_kind_, "comm", failed_);
    throw_comm(label, "this communicator is dead since an earlier failure: " + failed_);
  }

  // Ends what runs on the device. The mutex is held (or nobody else knows this object yet).
  void abort() {
    if (comm_ == nullptr) return;
    const int rank = rank_;
    const Watchdog watchdog(kAbortTimeout, [rank] {
      return "[comm] rank " + std::to_string(rank) + ": ncclCommAbort did not return within " +
             describe_seconds(kAbortTimeout.count()) + ": the device does not answer";
    });
    ncclCommAbort(comm_);
    comm_ = nullptr;
  }

  // The communicator is dead from here on. Buffers of unfinished operations are neither freed nor reused, nor is the
  // communicator of their headers, some of which may still be under way.
  void fail(ErrorKind kind, const std::string& text) {
    if (!failed_.empty()) return;
    failed_ = text;
    failed_kind_ = kind;
    abort();
    [[maybe_unused]] const auto* leaked = new auto(std::move(operations_));
    operations_.clear();
    [[maybe_unused]] const auto* leaked_too = headers_.release();
  }

  // Polls the state of NCCL until nothing is in progress on the host. The mutex is held.
  void await(Seconds timeout) {
    const auto deadline = deadline_of(timeout);
    for (int64_t turn = 0;; ++turn) {
      ncclResult_t state = ncclSuccess;
      check_nccl(ncclCommGetAsyncError(comm_, &state), "ncclCommGetAsyncError", comm_);
      if (state == ncclSuccess) return;
      if (state != ncclInProgress) fail_comm("NCCL reports " + describe_nccl(state, comm_));
      if (Clock::now() >= deadline) fail_comm("not done within " + describe_seconds(timeout.count()));
      if (turn < 1000) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
    }
  }

  // Compares the headers that have come with what was expected. True when all have. The mutex is held.
  bool headers_agree(Operation& op) {
    if (!op.headers) return true;
    if (!op.headers->test()) return false;
    op.headers.reset();
    for (const Operation::Expected& e : op.expected) {
      const auto* came = e.came.const_data_ptr<int64_t>();
      if (came[0] == e.sequence && came[1] == static_cast<int64_t>(e.dtype) && came[2] == e.bytes) continue;
      fail(ErrorKind::kMismatch,
           op.label + ": rank " + std::to_string(e.peer) + " sent " + std::to_string(came[2]) + " bytes (message " +
               std::to_string(came[0]) + " between these ranks, " + dtype_name(static_cast<at::ScalarType>(came[1])) +
               "), but rank " + std::to_string(rank_) + " expected " + std::to_string(e.bytes) + " bytes (message " +
               std::to_string(e.sequence) + " between these ranks, " + dtype_name(e.dtype) + ")");
      return false;
    }
    op.expected.clear();
    op.sent_headers.clear();
    return true;
  }

  // Whether NCCL has failed by itself; what with, in `state`. The mutex is held.
  bool broken(ncclResult_t* state = nullptr) const {
    if (comm_ == nullptr) return false;
    ncclResult_t found = ncclSuccess;
    if (ncclCommGetAsyncError(comm_, &found) != ncclSuccess) return false;
    if (state != nullptr) *state = found;
    return found != ncclSuccess && found != ncclInProgress;
  }

  // A message of another size breaks some transports of NCCL, too, and the headers say it better. True while some have
  // not come; when they differ, this communicator has failed with what they say. The mutex is held.
  bool mismatch_may_explain() {
    bool pending = false;
    for (const std::shared_ptr<Operation>& op : std::vector(operations_.begin(), operations_.end())) {
      try {
        pending = !headers_agree(*op) || pending;
      } catch (const Error&) {
        // Headers that cannot come explain nothing.
      }
      if (!failed_.empty()) return false;
    }
    return pending;
  }

  // One look at everything under way: asynchronous errors, headers, completion, deadlines. The mutex is held.
  void look_after() {
    if (!failed_.empty() || comm_ == nullptr || operations_.empty()) return;
    if (capturing()) return;  // a query would spoil the graph; the watching thread looks all the same
    const auto now = Clock::now();
    if (ncclResult_t state = ncclSuccess; broken(&state)) {
      if (!broken_since_) broken_since_ = now;
      if (mismatch_may_explain() && now - *broken_since_ < kHeadersBehind) return;  // another look will tell
      if (!failed_.empty()) return;
      const Operation& op = *operations_.front();
      fail(ErrorKind::kComm, op.label + ": " + op.description + ": NCCL reports " + describe_nccl(state, comm_));
      return;
    }
    bool turn = true;  // the device is done with all earlier operations
    for (auto it = operations_.begin(); it != operations_.end();) {
      Operation& op = **it;
      const std::string what = op.label + ": " + op.description;
      bool agreed = false;
      try {
        agreed = headers_agree(op);
      } catch (const Error& error) {
        fail(error.kind(), what + ": " + plain(error));
      }
      if (!failed_.empty()) return;
      const cudaError_t done = op.on_device ? op.done.query() : cudaErrorNotReady;
      if (done != cudaSuccess && done != cudaErrorNotReady) {
        fail(ErrorKind::kComm, what + ": the device failed: " + cudaGetErrorString(done));
        return;
      }
      if (done == cudaSuccess && agreed) {
        op.complete = true;
        op.tensors.clear();
        it = operations_.erase(it);
        continue;
      }
      // A device that failed says so in `done` as well.
      if (turn && op.on_device && !op.deadline && op.ready.query() == cudaSuccess)
        op.deadline = deadline_of(op.timeout);
      if (op.deadline && now >= *op.deadline) {
        fail(ErrorKind::kComm, what + ": not done within " + describe_seconds(op.timeout.count()));
        return;
      }
      turn = turn && done == cudaSuccess;
      ++it;
    }
  }

  void watch() {
    cudaSetDevice(options_.device);  // of this thread; should it fail, so does the first query
    // Else a query of this thread would spoil a CUDA graph that another thread captures meanwhile.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stop_) {
      if (operations_.empty()) {
        wake_.wait(lock, [this] { return stop_ || !operations_.empty(); });
      } else {
        wake_.wait_for(lock, kWatchInterval, [this] { return stop_; });
      }
      if (!stop_) look_after();
    }
  }

  // Whether the calling thread's current stream is being captured into a CUDA graph.
  bool capturing() const {
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(options_.device));
    return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  }

  // A graph would replay the transfer without the agreement, the deadline and the look at errors that belong to it.
  void refuse_capture(OpLabel label) const {
    if (!capturing()) return;
    throw Error(ErrorKind::kPlan, "comm",
                where(label) +
                    ": the current stream is being captured into a CUDA graph, which cannot hold transfers "
                    "between ranks; capture what lies between them");
  }

  // All ranks show what they are about to do, over host.
  void agree(Collective collective, const at::Tensor* tensor, int op, int root, OpLabel label) {
    refuse_capture(label);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      check_alive(label);
    }
    const CollectiveHeader mine = make_header(collective, calls_++, tensor, op, root, label);
    constexpr auto kBytes = static_cast<int64_t>(sizeof mine);
    at::Tensor one = at::empty({kBytes}, at::kByte);
    std::memcpy(one.mutable_data_ptr(), &mine, sizeof mine);
    at::Tensor all = at::empty({size_, kBytes}, at::kByte);
    host_->set_timeout(timeout_);
    try {
      // An operation of its own name, so that what differs is found by comparing the headers, all of them at once.
      host_->all_gather(all, one, {"agreement before a collective on GPUs", 0});
    } catch (const Error& e) {
      std::lock_guard<std::mutex> lock(mutex_);
      fail(e.kind(), where(label) + ": " + plain(e));
      check_alive(label);
    }
    std::vector<CollectiveHeader> headers(static_cast<size_t>(size_));
    std::memcpy(headers.data(), all.const_data_ptr(), all.nbytes());
    require_same_headers(headers, label);
  }

  std::shared_ptr<Operation> new_operation(OpLabel label, std::string description) const {
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(options_.device));  // the events' device
    auto op = std::make_shared<Operation>();
    op->label = where(label);
    op->description = std::move(description);
    op->timeout = timeout_;
    return op;
  }

  // Issues NCCL calls on the communication stream, after what the current stream holds. The mutex is held.
  template <typename Issue>
  void enqueue(const std::shared_ptr<Operation>& op, Issue issue) {
    try {
      const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(options_.device));
      op->issued_on = c10::cuda::getCurrentCUDAStream();
      op->ready.record(op->issued_on->stream());
      op->ready.block(stream_.stream());
      operations_.push_back(op);
      issue(stream_.stream());
      // Nothing is on the stream before NCCL says so; only then does an event behind it mean anything.
      await(op->timeout);
      op->done.record(stream_.stream());
      op->on_device = true;
    } catch (const Error& e) {
      const auto believed = Clock::now() + std::chrono::duration_cast<Clock::duration>(kHeadersBehind);
      while (broken() && mismatch_may_explain() && Clock::now() < believed) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      fail(e.kind(), op->label + ": " + op->description + ": " + plain(e));  // unless the headers have said why
      reported_ = true;
      throw Error(failed_kind_, "comm", failed_);
    } catch (const c10::Error& e) {
      fail(ErrorKind::kComm, op->label + ": " + op->description + ": " + e.what_without_backtrace());
      reported_ = true;
      throw Error(ErrorKind::kComm, "comm", failed_);
    }
    wake_.notify_all();
  }

  // Orders the current stream after op and lets go of its tensors. The mutex is held.
  void follow(Operation& op) {
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(options_.device));
    const c10::cuda::CUDAStream current = c10::cuda::getCurrentCUDAStream();
    op.done.block(current.stream());
    if (current != *op.issued_on) {
      for (const at::Tensor& tensor : op.tensors) {
        c10::cuda::CUDACachingAllocator::recordStream(tensor.storage().data_ptr(), stream_);
      }
    }
    op.tensors.clear();
  }

  template <typename Issue>
  void collective(const char* name, OpLabel label, std::vector<at::Tensor> tensors, Issue issue) {
    if (tensors.front().nbytes() == 0) return;
    std::lock_guard<std::mutex> lock(mutex_);
    check_alive(label);
    const auto op = new_operation(label, name);
    op->tensors = std::move(tensors);
    enqueue(op, [&](cudaStream_t stream) { check_nccl(issue(stream), name, comm_); });
    follow(*op);
  }

  std::unique_ptr<Communicator> host_;     // the caller's thread only
  std::unique_ptr<Communicator> headers_;  // under the mutex
  NcclOptions options_;
  c10::cuda::CUDAStream stream_;
  std::vector<int64_t> sent_;  // messages so far, by peer
  std::vector<int64_t> received_;
  int64_t calls_ = 0;

  std::mutex mutex_;
  std::condition_variable wake_;
  ncclComm_t comm_ = nullptr;
  std::list<std::shared_ptr<Operation>> operations_;  // in the order of issue
  std::string failed_;                                // why this communicator is dead
  ErrorKind failed_kind_ = ErrorKind::kComm;
  bool reported_ = false;                          // some call has raised it
  std::optional<Clock::time_point> broken_since_;  // when NCCL first reported an error
  bool stop_ = false;
  std::thread watcher_;
};

class NcclWork final : public Work {
 public:
  NcclWork(NcclCommunicator& comm, std::shared_ptr<Operation> op, OpLabel label)
      : comm_(comm), op_(std::move(op)), label_(label), exceptions_(std::uncaught_exceptions()) {}

  ~NcclWork() override {
    if (waited_) return;
    if (std::uncaught_exceptions() > exceptions_) {
      std::lock_guard<std::mutex> lock(comm_.mutex_);
      if (!op_->complete) comm_.fail(ErrorKind::kComm, op_->label + ": abandoned after another error");
      comm_.reported_ = !comm_.failed_.empty();  // the other error is on its way up
      return;
    }
    try {
      wait();
    } catch (const std::exception& e) {
      std::fprintf(stderr, "rank %d: %s\n", comm_.rank(), e.what());
    }
  }

  bool test() override {
    std::lock_guard<std::mutex> lock(comm_.mutex_);
    if (op_->complete) return true;
    comm_.check_alive(label_);
    return op_->complete;
  }

  void wait() override {
    if (waited_) return;
    waited_ = true;
    std::lock_guard<std::mutex> lock(comm_.mutex_);
    if (!op_->complete) comm_.check_alive(label_);
    if (op_->on_device) comm_.follow(*op_);  // otherwise it held nothing but empty messages
  }

 private:
  NcclCommunicator& comm_;
  std::shared_ptr<Operation> op_;
  OpLabel label_;
  int exceptions_;
  bool waited_ = false;
};

std::unique_ptr<Work> NcclCommunicator::exchange(const std::vector<Message>& sends,
                                                 const std::vector<Message>& receives, OpLabel label) {
  check_messages(sends, receives, size_, at::kCUDA, backend(), label);
  for (const Message& message : sends) check(message.tensor, "send buffer", label);
  for (const Message& message : receives) check(message.tensor, "receive buffer", label);
  refuse_capture(label);
  std::lock_guard<std::mutex> lock(mutex_);
  check_alive(label);

  std::string description;
  const auto describe = [&](const Message& message, bool is_send) {
    if (!description.empty() || message.tensor.nbytes() == 0) return;
    description = (is_send ? "sending " : "receiving ") + std::to_string(message.tensor.nbytes()) +
                  (is_send ? " bytes to rank " : " bytes from rank ") + std::to_string(message.peer);
  };
  for (const Message& message : receives) describe(message, false);
  for (const Message& message : sends) describe(message, true);
  const auto op = new_operation(label, description);

  // Empty messages move nothing, but are counted, so that a peer that does expect data finds the gap.
  std::vector<Message> header_sends;
  std::vector<Message> header_receives;
  for (const Message& message : receives) {
    const int64_t sequence = received_[static_cast<size_t>(message.peer)]++;
    if (message.tensor.nbytes() == 0) continue;
    op->tensors.push_back(message.tensor);
    op->expected.push_back({at::empty({kHeaderWords}, at::kLong), message.peer, sequence, message.tensor.scalar_type(),
                            static_cast<int64_t>(message.tensor.nbytes())});
    header_receives.push_back({op->expected.back().came, message.peer});
    stats_.messages_received += 1;
    stats_.bytes_received += static_cast<int64_t>(message.tensor.nbytes());
  }
  for (const Message& message : sends) {
    const int64_t sequence = sent_[static_cast<size_t>(message.peer)]++;
    if (message.tensor.nbytes() == 0) continue;
    op->tensors.push_back(message.tensor);
    at::Tensor header = at::empty({kHeaderWords}, at::kLong);
    auto* words = header.mutable_data_ptr<int64_t>();
    words[0] = sequence;
    words[1] = static_cast<int64_t>(message.tensor.scalar_type());
    words[2] = static_cast<int64_t>(message.tensor.nbytes());
    op->sent_headers.push_back(header);
    header_sends.push_back({header, message.peer});
    stats_.messages_sent += 1;
    stats_.bytes_sent += static_cast<int64_t>(message.tensor.nbytes());
  }
  if (op->tensors.empty()) {
    op->complete = true;
    return std::make_unique<NcclWork>(*this, op, label);
  }
  headers_->set_timeout(timeout_);
  op->headers = headers_->exchange(header_sends, header_receives, {"headers of an exchange on GPUs", 0});

  enqueue(op, [&](cudaStream_t stream) {
    check_nccl(ncclGroupStart(), "ncclGroupStart", comm_);
    ncclResult_t code = ncclSuccess;
    const char* call = "";
    // In one group, in list order: NCCL matches the messages of a pair by their order.
    for (const Message& message : receives) {
      if (message.tensor.nbytes() == 0 || (code != ncclSuccess && code != ncclInProgress)) continue;
      call = "ncclRecv";
      code =
          ncclRecv(message.tensor.mutable_data_ptr(), message.tensor.nbytes(), ncclUint8, message.peer, comm_, stream);
    }
    for (const Message& message : sends) {
      if (message.tensor.nbytes() == 0 || (code != ncclSuccess && code != ncclInProgress)) continue;
      call = "ncclSend";
      code = ncclSend(message.tensor.const_data_ptr(), message.tensor.nbytes(), ncclUint8, message.peer, comm_, stream);
    }
    // A group that was begun is ended whatever happened in it.
    const ncclResult_t ended = ncclGroupEnd();
    check_nccl(code, call, comm_);
    check_nccl(ended, "ncclGroupEnd", comm_);
  });
  return std::make_unique<NcclWork>(*this, op, label);
}

// 22809 -> "2.28.9"
std::string version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

// NCCL_HOSTID, the older way, needs no word here: such ranks differ in it.
bool several_ranks_a_gpu(int version) {
  const char* enabled = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return version >= NCCL_VERSION(2, 30, 0) && enabled != nullptr && std::string_view(enabled) == "1";
}

}  // namespace

std::string nccl_unavailable() {
  int devices = 0;
  const cudaError_t code = cudaGetDeviceCount(&devices);
  if (code != cudaSuccess) {
    cudaGetLastError();  // said; not to be found by the next call
    return std::string("no CUDA device: ") + cudaGetErrorString(code) + "; use device = \"cpu\"";
  }
  if (devices == 0) return "no CUDA device on this host; use device = \"cpu\"";
  return "";
}

std::string nccl_version() {
  int version = 0;
  check_nccl(ncclGetVersion(&version), "ncclGetVersion", nullptr);
  return version_text(version);
}

std::unique_ptr<Communicator> make_nccl_communicator(Communicator& host, const NcclOptions& options) {
  const OpLabel label{"starting NCCL", 0};
  std::string problem = nccl_unavailable();
  std::string identity;
  if (problem.empty()) {
    int devices = 0;
    cudaGetDeviceCount(&devices);
    char bus[32] = {};
    if (options.device < 0 || options.device >= devices) {
      problem = "no CUDA device " + std::to_string(options.device) + ": this host has " + std::to_string(devices);
    } else if (cudaDeviceGetPCIBusId(bus, sizeof bus, options.device) == cudaSuccess) {
      // Under NCCL_HOSTID, NCCL takes processes of one host for processes of different ones.
      const char* host_id = std::getenv("NCCL_HOSTID");
      char name[256] = {};
      gethostname(name, sizeof name - 1);
      identity = std::string(name) + " " + bus + (host_id != nullptr ? std::string(" ") + host_id : "");
    }
  }
  std::unique_ptr<Communicator> own = host.split(0, host.rank());
  own->set_timeout(options.timeout);
  // Together or not at all: a rank without a GPU tells the others.
  const std::vector<std::string> problems = all_gather_text(*own, problem, label);
  for (size_t r = 0; r < problems.size(); ++r) {
    if (problems[r].empty()) continue;
    throw Error(ErrorKind::kUnavailable, "comm", "NCCL cannot start: rank " + std::to_string(r) + ": " + problems[r]);
  }
  int version = 0;
  check_nccl(ncclGetVersion(&version), "ncclGetVersion", nullptr);
  require_agreement(*own, {{"NCCL version", version_text(version)}}, label);
  const std::vector<std::string> identities = all_gather_text(*own, identity, label);
  for (size_t r = 0; r < identities.size(); ++r) {
    for (size_t other = 0; other < r; ++other) {
      if (identities[r].empty() || identities[r] != identities[other] || several_ranks_a_gpu(version)) continue;
      throw Error(ErrorKind::kPlan, "comm",
                  "ranks " + std::to_string(other) + " and " + std::to_string(r) + " use the same GPU (" +
                      identities[r] + "): NCCL " + version_text(version) +
                      " takes one rank a GPU; start as many ranks as GPUs. For a trial of several ranks on one GPU: "
                      "from NCCL 2.30 on set NCCL_MULTI_RANK_GPU_ENABLE=1, before that start each rank as a process "
                      "with an NCCL_HOSTID of its own");
    }
  }
  std::unique_ptr<Communicator> headers = own->split(0, own->rank());
  return std::make_unique<NcclCommunicator>(std::move(own), std::move(headers), options);
}

}  // namespace annulus
