// NCCL's communicator of one rank, and CUDA events. Every call is checked, and none waits without a deadline. Internal
// to comm/nccl, and only in CUDA builds.
#pragma once

#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <string>

#include "comm/communicator.h"
#include "comm/nccl/operation_watch.h"

namespace annulus::nccl_internal {

// Both raise Error(kComm) naming the call if `code` is an error. ncclInProgress is not an error: the caller then polls
// the state of the communicator. comm may be null.
void check_cuda(cudaError_t code, const char* call);
void check_nccl(ncclResult_t code, const char* call, ncclComm_t comm);

class Event {
 public:
  // timed: seconds_since() may be called with two such events.
  explicit Event(bool timed = false) {
    check_cuda(cudaEventCreateWithFlags(&event_, timed ? cudaEventDefault : cudaEventDisableTiming),
               "cudaEventCreateWithFlags");
  }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(cudaStream_t stream) { check_cuda(cudaEventRecord(event_, stream), "cudaEventRecord"); }
  void block(cudaStream_t stream) const { check_cuda(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent"); }
  // The time on the device between the two events, which both must have been reached.
  Seconds seconds_since(const Event& earlier) const {
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, earlier.event_, event_), "cudaEventElapsedTime");
    return Seconds(milliseconds / 1e3);
  }
  // cudaSuccess, cudaErrorNotReady or the error of the device. The CUDA runtime keeps cudaErrorNotReady as the thread's
  // last error, so that LibTorch would raise it at its next kernel launch; this function clears it.
  cudaError_t query() const {
    const cudaError_t code = cudaEventQuery(event_);
    if (code == cudaErrorNotReady) cudaGetLastError();
    return code;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// NCCL's communicator is non-blocking: no call keeps the host waiting beyond a deadline. Thread safety: the caller
// holds the mutex of the watch that uses it.
class NcclHandle final : public Transport {
 public:
  NcclHandle(int rank, int device) : rank_(rank), device_(device) {}

  // Joins the communicator with rank 0's id, a text of sizeof(ncclUniqueId) bytes. max_ctas: the most thread blocks
  // that NCCL may take for an operation; 0: NCCL chooses. Raises Error(kComm).
  void join(const std::string& id, int size, int max_ctas, Seconds timeout);
  // Ends the communicator together with the other ranks, after all operations are done. Raises Error(kComm).
  void finish(Seconds timeout);

  // Polls the state of NCCL until nothing is in progress on the host.
  void await(Seconds timeout);
  ncclComm_t get() const { return comm_; }
  c10::cuda::CUDAGuard guard() const { return c10::cuda::CUDAGuard(device()); }

  std::string error() override;
  void abort(const std::string& why) override;
  bool capturing() const override;

 private:
  c10::DeviceIndex device() const { return static_cast<c10::DeviceIndex>(device_); }

  int rank_;
  int device_;
  ncclComm_t comm_ = nullptr;
};

// Makes rank 0's id for join(). Raises Error(kComm) if NCCL cannot make one.
std::string make_nccl_id();

// As ncclGetVersion() gives it: 22809 is 2.28.9.
int nccl_version_number();

}  // namespace annulus::nccl_internal
