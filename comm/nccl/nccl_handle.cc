// See nccl_handle.h.
#include "comm/nccl/nccl_handle.h"

#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "comm/checks.h"
#include "comm/watchdog.h"

namespace annulus::nccl_internal {

using comm_internal::Deadline;
using comm_internal::missed_deadline;

namespace {

// ncclCommAbort waits for the device. If the device does not respond within this time either, the process ends.
constexpr Seconds kAbortTimeout{30};

[[noreturn]] void fail_comm(const std::string& message) { throw Error(ErrorKind::kComm, "comm", message); }

std::string describe_nccl(ncclResult_t code, ncclComm_t comm) {
  const char* last = ncclGetLastError(comm);
  return ncclGetErrorString(code) + (last != nullptr && *last != '\0' ? " (" + std::string(last) + ")" : "");
}

}  // namespace

void check_cuda(cudaError_t code, const char* call) {
  if (code != cudaSuccess) fail_comm(std::string(call) + " failed: " + cudaGetErrorString(code));
}

void check_nccl(ncclResult_t code, const char* call, ncclComm_t comm) {
  if (code == ncclSuccess || code == ncclInProgress) return;
  fail_comm(std::string(call) + " failed: " + describe_nccl(code, comm));
}

std::string make_nccl_id() {
  ncclUniqueId id{};
  check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId", nullptr);
  return std::string(id.internal, sizeof id.internal);
}

void NcclHandle::join(const std::string& id, int size, int max_ctas, Seconds timeout) {
  const auto on_device = guard();
  ncclUniqueId unique{};
  if (id.size() != sizeof unique.internal) fail_comm("the id of NCCL's communicator does not have NCCL's length");
  std::memcpy(unique.internal, id.data(), id.size());
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  if (max_ctas > 0) config.maxCTAs = max_ctas;
  try {
    check_nccl(ncclCommInitRankConfig(&comm_, size, unique, rank_, &config), "ncclCommInitRankConfig", nullptr);
    await(timeout);
  } catch (const Error& e) {
    const std::string why = "waiting for all ranks in ncclCommInitRankConfig: " + plain(e);
    abort(why);
    fail_comm(why);
  }
}

void NcclHandle::finish(Seconds timeout) {
  const auto on_device = guard();
  check_nccl(ncclCommFinalize(comm_), "ncclCommFinalize", comm_);
  await(timeout);
  check_nccl(ncclCommDestroy(comm_), "ncclCommDestroy", comm_);
  comm_ = nullptr;
}

void NcclHandle::await(Seconds timeout) {
  const Deadline deadline(timeout);
  for (int64_t turn = 0;; ++turn) {
    ncclResult_t state = ncclSuccess;
    check_nccl(ncclCommGetAsyncError(comm_, &state), "ncclCommGetAsyncError", comm_);
    if (state == ncclSuccess) return;
    if (state != ncclInProgress) fail_comm("NCCL reports " + describe_nccl(state, comm_));
    if (deadline.passed()) fail_comm(missed_deadline("not done", timeout));
    if (turn < 1000) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
}

std::string NcclHandle::error() {
  if (comm_ == nullptr) return "";
  ncclResult_t state = ncclSuccess;
  if (ncclCommGetAsyncError(comm_, &state) != ncclSuccess) return "";
  return state == ncclSuccess || state == ncclInProgress ? "" : describe_nccl(state, comm_);
}

// The call also waits for what the device was given before the last transfer, which may be much.
void NcclHandle::abort(const std::string& why) {
  if (comm_ == nullptr) return;
  const auto message = [&why] {
    return missed_deadline(why + "; besides, ncclCommAbort did not return", kAbortTimeout) +
           ": the device does not respond, or has more to do";
  };
  const comm_internal::Watchdog watchdog(kAbortTimeout, message, rank_);
  ncclCommAbort(comm_);
  comm_ = nullptr;
}

// An earlier failure of the device is reported by whichever call comes next. Raised here, it would name no operation.
bool NcclHandle::capturing() const {
  try {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaError_t code = cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(device()).stream(), &status);
    if (code == cudaSuccess) return status != cudaStreamCaptureStatusNone;
    cudaGetLastError();                             // clears the error unless the device has failed
    return code == cudaErrorStreamCaptureImplicit;  // another stream captures, and no stream can be asked
  } catch (const c10::Error&) {
    return false;
  }
}

int nccl_version_number() {
  int version = 0;
  check_nccl(ncclGetVersion(&version), "ncclGetVersion", nullptr);
  return version;
}

}  // namespace annulus::nccl_internal
