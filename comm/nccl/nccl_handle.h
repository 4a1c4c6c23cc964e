// NCCL's communicator of one rank, and CUDA's events: every call checked, none without a deadline. Internal to
// comm/nccl, and only in CUDA builds.
#pragma once

#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <string>

#include "comm/communicator.h"
#include "comm/nccl/operation_watch.h"

namespace annulus::nccl_internal {

void check_cuda(cudaError_t code, const char* call);
// In progress is no failure: the caller polls the communicator's state afterwards. comm may be null.
void check_nccl(ncclResult_t code, const char* call, ncclComm_t comm);

class Event {
 public:
  // timed: seconds_since() may be asked of two such.
  explicit Event(bool timed = false) {
    check_cuda(cudaEventCreateWithFlags(&event_, timed ? cudaEventDefault : cudaEventDisableTiming),
               "cudaEventCreateWithFlags");
  }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(cudaStream_t stream) { check_cuda(cudaEventRecord(event_, stream), "cudaEventRecord"); }
  void block(cudaStream_t stream) const { check_cuda(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent"); }
  // Both have been reached.
  Seconds seconds_since(const Event& earlier) const {
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, earlier.event_, event_), "cudaEventElapsedTime");
    return Seconds(milliseconds / 1e3);
  }
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

// The communicator of NCCL is non-blocking: no call of it keeps the host waiting beyond a deadline. Thread safety: none
// but that of the mutex of the watch that uses it.
class NcclHandle final : public Transport {
 public:
  NcclHandle(int rank, int device) : rank_(rank), device_(device) {}

  // Joins the communicator that rank 0's id, a text of sizeof(ncclUniqueId) bytes, names.
  void join(const std::string& id, int size, Seconds timeout);
  // Ends it together with the other ranks, when all is done.
  void finish(Seconds timeout);

  // Polls the state of NCCL until nothing is in progress on the host.
  void await(Seconds timeout);
  ncclComm_t get() const { return comm_; }
  c10::cuda::CUDAGuard guard() const { return c10::cuda::CUDAGuard(static_cast<c10::DeviceIndex>(device_)); }

  std::string error() override;
  void abort() override;
  bool capturing() const override;

 private:
  int rank_;
  int device_;
  ncclComm_t comm_ = nullptr;
};

// Rank 0's id for join(). Error(kComm) where NCCL makes none.
std::string make_nccl_id();

// 22809 -> "2.28.9"
std::string nccl_version_text(int version);
int nccl_version_number();

}  // namespace annulus::nccl_internal
