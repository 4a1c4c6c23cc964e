// The NCCL backend: see nccl_communicator.h.
//
// Threads. The mutex of the watch guards NCCL's handle, the operations on the device, and the communicator that carries
// their headers. The caller's thread and the watching thread use these, and neither holds the mutex for longer than a
// deadline, nor in calls that wait while the caller's stream has as much to do as it can hold. Only the caller's thread
// uses the host communicator. Both threads may call MPI at the same time; the mutex of MpiRuntime, which is held for
// one call at a time, makes that safe.
//
// Memory. Transfers run on this communicator's stream, between two events:
// - `ready` is recorded on the caller's stream at the start, and this stream waits for it. So a receive buffer is not
//   written before the kernels that read its old content have run, and data are not sent before they are computed.
// - `done` is recorded on this stream, and the caller's stream waits for it in Work::wait(). So whatever the caller
//   issues afterwards (reading, writing, or freeing the memory for another tensor) runs after the transfer.
// Tensors are kept until then (test() and the watching thread release them earlier if the device is done with them).
// The allocator reuses freed memory in the order of the stream on which it was allocated, so after wait() on the stream
// that started the transfer nothing has to be kept. Recording this stream with the allocator as well would keep the
// memory until the host sees that the transfer is done, and the host may be a whole step ahead. It is recorded only if
// another stream waits.
#include "comm/nccl/nccl_communicator.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <utility>

#include "comm/agreement.h"
#include "comm/checks.h"
#include "comm/communicator_backend.h"
#include "comm/headers.h"
#include "comm/nccl/message_headers.h"
#include "comm/nccl/nccl_handle.h"
#include "comm/nccl/nccl_internal.h"
#include "comm/nccl/operation_watch.h"
#include "common/error.h"
#include "common/logging/log.h"

namespace annulus::nccl_internal {
namespace {

using namespace comm_internal;

ncclDataType_t nccl_type(at::ScalarType dtype) {
  if (dtype == at::kFloat) return ncclFloat32;
  if (dtype == at::kDouble) return ncclFloat64;
  if (dtype == at::kBFloat16) return ncclBfloat16;
  return ncclInt64;
}

ncclRedOp_t nccl_op(ReduceOp op) { return op == ReduceOp::kSum ? ncclSum : op == ReduceOp::kMax ? ncclMax : ncclMin; }

at::Device cuda(int device) { return at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device)); }

class CudaOperation final : public Operation {
 public:
  CudaOperation(std::string label, std::string description, Seconds timeout, std::vector<at::Tensor> held)
      : Operation(std::move(label), std::move(description), timeout), tensors(std::move(held)) {}

  HeaderResult headers() override { return comparison ? comparison->result() : HeaderResult(); }
  // An error of the device is not reported here: done() finds it in `done_event` as well.
  bool reached() override { return ready.query() == cudaSuccess; }
  bool done() override {
    const cudaError_t code = done_event.query();
    if (code == cudaSuccess) return true;
    if (code == cudaErrorNotReady) return false;
    throw Error(ErrorKind::kComm, "comm", cudaGetErrorString(code));
  }
  void release() override { tensors.clear(); }

  Event ready, done_event;                         // see the head of this file
  std::vector<at::Tensor> tensors;                 // kept, so that the allocator does not reuse their memory
  std::optional<c10::cuda::CUDAStream> issued_on;  // the caller's stream
  std::unique_ptr<MessageHeaders::Comparison> comparison = nullptr;  // null if the ranks have agreed before
};

class NcclCommunicator final : public CommunicatorBackend {
 public:
  NcclCommunicator(std::unique_ptr<Communicator> host, std::unique_ptr<Communicator> headers,
                   const NcclOptions& options)
      : CommunicatorBackend(host->rank(), host->size(), cuda(options.device)),
        host_(std::move(host)),
        headers_(std::make_unique<MessageHeaders>(std::move(headers))),
        options_(options),
        stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, static_cast<c10::DeviceIndex>(options.device))),
        handle_(rank_, options.device),
        watch_(handle_, "the device of " + describe_ranks(*host_, {rank_})) {
    hosts_ = host_->hosts();
    const OpLabel label{"starting NCCL", 0};
    const auto guard = handle_.guard();
    // The other ranks find rank 0 by its id. If rank 0 cannot make one, all ranks raise its error.
    const std::string id = from_first(*host_, label, make_nccl_id);
    try {
      handle_.join(id, size_, options.max_ctas, options.timeout);
    } catch (const Error& e) {
      throw_comm(label, plain(e));
    }
    watch_.start([device = options.device] {
      cudaSetDevice(device);  // for this thread; if it fails, the first query fails as well
      // Otherwise a query of this thread would invalidate a CUDA graph that another thread is capturing.
      cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
      cudaThreadExchangeStreamCaptureMode(&mode);
    });
  }

  ~NcclCommunicator() override {
    watch_.stop();
    std::lock_guard<std::mutex> lock(watch_.mutex());
    if (!watch_.failure() && std::uncaught_exceptions() == 0) {
      try {
        handle_.finish(timeout_);
        return;
      } catch (const std::exception& e) {
        log_error("comm", std::string("ending NCCL: ") + e.what());
      }
    }
    watch_.fail(ErrorKind::kComm, "closed");
    [[maybe_unused]] const auto* leaked = headers_.release();  // comparisons may still be under way
  }

  std::string_view backend() const override { return "nccl"; }
  int in_job(int rank) const override { return host_->in_job(rank); }
  Communicator& host() override {
    host_->set_timeout(timeout_);
    return *host_;
  }

  void progress() override { raise_new_failure({"progress", 0}); }

 protected:
  // A graph would replay the transfer without its agreement, its deadline and its check for errors.
  void before_operation(OpLabel label) override {
    if (handle_.capturing()) {
      throw Error(ErrorKind::kPlan, "comm",
                  where(label) +
                      ": the current stream is being captured into a CUDA graph, which cannot contain transfers "
                      "between ranks; capture only the work between them");
    }
    raise_new_failure(label);
  }

  std::vector<CollectiveHeader> gather_headers(const CollectiveHeader& mine, const at::Tensor& brings,
                                               OpLabel label) override {
    try {
      return CommunicatorBackend::gather_headers(mine, brings, label);
    } catch (const Error& e) {
      {
        std::lock_guard<std::mutex> lock(watch_.mutex());
        watch_.fail(e.kind(), where(label) + ": " + plain(e));
      }
      raise_new_failure(label);
      throw;
    }
  }

  std::unique_ptr<StartedOperation> start_exchange(const std::vector<Message>& sends,
                                                   const std::vector<Message>& receives, OpLabel label) override;
  std::unique_ptr<StartedOperation> start_all_reduce(at::Tensor& tensor, ReduceOp op, OpLabel label) override;
  std::unique_ptr<StartedOperation> start_broadcast(at::Tensor& tensor, int root, OpLabel label) override;
  std::unique_ptr<StartedOperation> begin(const Begun& call) override;
  bool adds_in_rank_order() const override { return false; }

  std::unique_ptr<Communicator> make_split(int color, int key, OpLabel) override {
    std::unique_ptr<Communicator> split = host().split(color, key);
    if (!split) return nullptr;
    NcclOptions options = options_;
    options.timeout = timeout_;
    options.max_ctas = split_options().max_ctas;
    std::unique_ptr<Communicator> headers = split->split(0, split->rank());
    return std::make_unique<NcclCommunicator>(std::move(split), std::move(headers), options);
  }

 private:
  class Started;

  // Checks what is under way, and raises an error that has occurred.
  void raise_new_failure(OpLabel label) {
    {
      std::lock_guard<std::mutex> lock(watch_.mutex());
      watch_.check();
      raise_failure(label);
    }
    if (!waits_.empty() && !handle_.capturing()) on_device(label, [&] { add_waits(); });
  }

  // Runs `body`, in which any call may report an earlier failure of the device. The caller does not hold the mutex:
  // with a full queue of the current stream, calls that add to it wait for the device, and the device may wait for a
  // transfer whose peer has died, which the watching thread must be able to abort meanwhile.
  template <typename Body>
  void on_device(OpLabel label, Body body) {
    std::string reason;
    try {
      const auto guard = handle_.guard();
      body();
      return;
    } catch (const Error& e) {
      reason = plain(e);
    } catch (const c10::Error& e) {
      reason = in_short(e);
    }
    std::lock_guard<std::mutex> lock(watch_.mutex());
    watch_.fail_device(where(label), reason);
    raise_failure(label);
  }

  // The caller holds the mutex.
  void raise_failure(OpLabel label) {
    if (const auto& failure = watch_.failure()) fail(failure->kind, failure->text, /*raised=*/false);
    check_alive(label);
  }

  // Adds an operation whose headers are on their way, and issues its NCCL calls on the communication stream, after the
  // work on the current stream. `lock` holds the mutex.
  template <typename Issue>
  void enqueue(std::unique_lock<std::mutex> lock, const std::shared_ptr<CudaOperation>& op, OpLabel label,
               Issue issue) {
    watch_.add(op);
    lock.unlock();
    on_device(label, [&] {
      op->issued_on = c10::cuda::getCurrentCUDAStream();
      op->ready.record(op->issued_on->stream());
    });
    lock.lock();
    raise_failure(label);
    try {
      const auto guard = handle_.guard();
      op->ready.block(stream_.stream());
      issue(handle_.get(), stream_.stream());
      // The transfer is on the stream only once NCCL is no longer in progress; the event must be recorded after it.
      handle_.await(op->timeout());
      op->done_event.record(stream_.stream());
      op->set_issued();
    } catch (const Error& e) {
      watch_.fail_unless_headers_explain(e.kind(), op->what() + ": " + watch_.device() + ": " + plain(e));
      raise_failure(label);
    } catch (const c10::Error& e) {
      watch_.fail_device(op->what(), in_short(e));
      raise_failure(label);
    }
    watch_.wake();
  }

  // Orders the current stream after op and releases its tensors.
  void follow(CudaOperation& op, OpLabel label, WaitFor what) {
    const c10::cuda::CUDAStream current = c10::cuda::getCurrentCUDAStream();
    if (spare_.empty()) spare_.push_back(std::make_unique<Wait>());
    std::unique_ptr<Wait> wait = std::move(spare_.back());
    spare_.pop_back();
    wait->what = what;
    wait->before.record(current.stream());
    op.done_event.block(current.stream());
    wait->after.record(current.stream());
    waits_.push_back(std::move(wait));
    std::lock_guard<std::mutex> lock(watch_.mutex());
    if (!op.complete()) raise_failure(label);  // it may have been aborted while this thread waited above
    if (current != *op.issued_on) {
      for (const at::Tensor& tensor : op.tensors) {
        c10::cuda::CUDACachingAllocator::recordStream(tensor.storage().data_ptr(), stream_);
      }
    }
    op.tensors.clear();
  }

  // Adds the times of the waits that the device has finished.
  void add_waits() {
    while (!waits_.empty() && waits_.front()->after.query() == cudaSuccess) {
      add_wait(waits_.front()->what, waits_.front()->after.seconds_since(waits_.front()->before));
      spare_.push_back(std::move(waits_.front()));
      waits_.pop_front();
    }
  }

  std::shared_ptr<CudaOperation> new_operation(OpLabel label, std::string description, std::vector<at::Tensor> held) {
    std::shared_ptr<CudaOperation> op;
    on_device(label, [&] {
      op = std::make_shared<CudaOperation>(where(label), std::move(description), timeout_, std::move(held));
    });
    return op;
  }

  // `header`: that of a collective that was begun; null if the ranks have agreed before.
  template <typename Issue>
  std::unique_ptr<StartedOperation> collective(const char* name, OpLabel label, std::vector<at::Tensor> tensors,
                                               const CollectiveHeader* header, WaitFor what, Issue issue);

  // The time for which the device waited for a transfer: between two events on the stream that waited.
  struct Wait {
    WaitFor what = WaitFor::kOther;
    Event before{/*timed=*/true}, after{/*timed=*/true};
  };

  std::unique_ptr<Communicator> host_;       // used by the caller's thread only
  std::unique_ptr<MessageHeaders> headers_;  // guarded by the mutex
  NcclOptions options_;
  c10::cuda::CUDAStream stream_;
  NcclHandle handle_;  // guarded by the mutex, but for guard() and capturing()
  OperationWatch watch_;
  // Used by the caller's thread only.
  std::deque<std::unique_ptr<Wait>> waits_;   // waits whose time is not added yet, in the order of issue
  std::vector<std::unique_ptr<Wait>> spare_;  // for reuse, because making events takes longer than using them
};

class NcclCommunicator::Started final : public StartedOperation {
 public:
  Started(NcclCommunicator& comm, std::shared_ptr<CudaOperation> op, OpLabel label, WaitFor what)
      : comm_(comm), op_(std::move(op)), label_(label), what_(what) {}

  bool test() override {
    if (!complete()) comm_.raise_new_failure(label_);
    return complete();
  }

  bool wait() override {
    if (!complete()) comm_.raise_new_failure(label_);
    comm_.on_device(label_, [&] { comm_.follow(*op_, label_, what_); });
    return false;
  }

  void abandon() override {
    std::lock_guard<std::mutex> lock(comm_.watch_.mutex());
    if (!op_->complete()) comm_.watch_.fail(ErrorKind::kComm, op_->label() + ": abandoned after another error");
    // The other error is being raised already.
    if (const auto& failure = comm_.watch_.failure()) comm_.fail(failure->kind, failure->text, /*raised=*/true);
  }

 private:
  bool complete() const {
    std::lock_guard<std::mutex> lock(comm_.watch_.mutex());
    return op_->complete();
  }

  NcclCommunicator& comm_;
  std::shared_ptr<CudaOperation> op_;
  OpLabel label_;
  WaitFor what_;
};

template <typename Issue>
std::unique_ptr<StartedOperation> NcclCommunicator::collective(const char* name, OpLabel label,
                                                               std::vector<at::Tensor> tensors,
                                                               const CollectiveHeader* header, WaitFor what,
                                                               Issue issue) {
  const auto op = new_operation(label, name, std::move(tensors));
  std::unique_lock<std::mutex> lock(watch_.mutex());
  raise_failure(label);
  if (header) op->comparison = headers_->start_collective(*header, label.counted, timeout_);
  enqueue(std::move(lock), op, label,
          [&](ncclComm_t comm, cudaStream_t stream) { check_nccl(issue(comm, stream), name, comm); });
  return std::make_unique<Started>(*this, op, label, what);
}

std::unique_ptr<StartedOperation> NcclCommunicator::start_all_reduce(at::Tensor& tensor, ReduceOp op, OpLabel label) {
  return collective(
      "all_reduce", label, {tensor}, nullptr, WaitFor::kReduce, [&](ncclComm_t comm, cudaStream_t stream) {
        return ncclAllReduce(tensor.const_data_ptr(), tensor.mutable_data_ptr(), static_cast<size_t>(tensor.numel()),
                             nccl_type(tensor.scalar_type()), nccl_op(op), comm, stream);
      });
}

std::unique_ptr<StartedOperation> NcclCommunicator::start_broadcast(at::Tensor& tensor, int root, OpLabel label) {
  return collective("broadcast", label, {tensor}, nullptr, WaitFor::kGather, [&](ncclComm_t comm, cudaStream_t stream) {
    return ncclBroadcast(tensor.const_data_ptr(), tensor.mutable_data_ptr(), tensor.nbytes(), ncclUint8, root, comm,
                         stream);
  });
}

// Issues the transfer before the ranks have agreed. The watch compares their headers meanwhile, as in an exchange.
std::unique_ptr<StartedOperation> NcclCommunicator::begin(const Begun& call) {
  const void* from = call.in.const_data_ptr();
  void* to = call.out.mutable_data_ptr();
  const auto dtype = call.in.scalar_type();
  const size_t bytes = call.in.nbytes();
  return collective(call.name(), call.label, {call.out, call.in}, &call.header, wait_for(call),
                    [&](ncclComm_t comm, cudaStream_t stream) {
                      if (bytes == 0) return ncclSuccess;
                      if (call.collective() == Collective::kAllGather) {
                        return ncclAllGather(from, to, bytes, ncclUint8, comm, stream);
                      }
                      if (call.collective() == Collective::kAllReduce) {
                        return ncclAllReduce(from, to, static_cast<size_t>(call.in.numel()), nccl_type(dtype),
                                             nccl_op(call.op()), comm, stream);
                      }
                      return ncclReduceScatter(from, to, static_cast<size_t>(call.out.numel()), nccl_type(dtype),
                                               ncclSum, comm, stream);
                    });
}

std::unique_ptr<StartedOperation> NcclCommunicator::start_exchange(const std::vector<Message>& sends,
                                                                   const std::vector<Message>& receives,
                                                                   OpLabel label) {
  std::string description;
  std::vector<at::Tensor> held;
  const auto hold = [&](const Message& message, const char* doing, const char* whom) {
    if (message.tensor.nbytes() == 0) return;
    if (description.empty()) {
      description = doing + std::to_string(message.tensor.nbytes()) + whom + describe_ranks(*this, {message.peer});
    }
    held.push_back(message.tensor);
  };
  for (const Message& message : receives) hold(message, "receiving ", " bytes from ");
  for (const Message& message : sends) hold(message, "sending ", " bytes to ");
  const auto op = new_operation(label, std::move(description), std::move(held));

  std::unique_lock<std::mutex> lock(watch_.mutex());
  raise_failure(label);
  op->comparison = headers_->start(sends, receives, timeout_);
  if (!op->comparison) return nullptr;
  enqueue(std::move(lock), op, label, [&](ncclComm_t comm, cudaStream_t stream) {
    check_nccl(ncclGroupStart(), "ncclGroupStart", comm);
    ncclResult_t code = ncclSuccess;
    const char* call = "";
    // The messages are in one group, in the order of the lists: NCCL matches the messages of two ranks by their order.
    for (const Message& message : receives) {
      if (message.tensor.nbytes() == 0 || (code != ncclSuccess && code != ncclInProgress)) continue;
      call = "ncclRecv";
      code =
          ncclRecv(message.tensor.mutable_data_ptr(), message.tensor.nbytes(), ncclUint8, message.peer, comm, stream);
    }
    for (const Message& message : sends) {
      if (message.tensor.nbytes() == 0 || (code != ncclSuccess && code != ncclInProgress)) continue;
      call = "ncclSend";
      code = ncclSend(message.tensor.const_data_ptr(), message.tensor.nbytes(), ncclUint8, message.peer, comm, stream);
    }
    // A group that was started must be ended, even after an error in it.
    const ncclResult_t ended = ncclGroupEnd();
    check_nccl(code, call, comm);
    check_nccl(ended, "ncclGroupEnd", comm);
  });
  return std::make_unique<Started>(*this, op, label, WaitFor::kExchange);
}

}  // namespace

std::unique_ptr<Communicator> join_nccl(std::unique_ptr<Communicator> host, std::unique_ptr<Communicator> headers,
                                        const NcclOptions& options) {
  return std::make_unique<NcclCommunicator>(std::move(host), std::move(headers), options);
}

}  // namespace annulus::nccl_internal
