// See step_graph.h.
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/ScopeExit.h>
#include <cuda_runtime_api.h>

#include <exception>
#include <utility>

#include "attention/kernels/composed_kernel.h"
#include "training/step_graph.h"

namespace annulus {
namespace {

// Calls before the one that records: libraries take their workspaces and choose their algorithms in the first ones.
constexpr int kWarmUp = 3;

// The first line of what LibTorch says; the rest is advice for programmers, and a stack.
std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

struct StepGraph::State {
  explicit State(at::Device d)
      : device(d.has_index() ? d.index() : c10::cuda::current_device()),
        stream(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device)) {}

  // On `stream`, after what the current stream has been given and before what it will be: recording needs a stream that
  // is not the default one, and the work before it must have warmed up that one. The backward runs its part on another
  // thread, on the stream of the forward.
  void on_stream(const std::function<void()>& work) {
    const c10::cuda::CUDAStream current = c10::cuda::getCurrentCUDAStream(device);
    at::cuda::CUDAEvent before, after;
    before.record(current);
    before.block(stream);
    // Also where the work throws: what it has given the device by then still reads and writes.
    const auto join = c10::make_scope_exit([&] {
      after.record(stream);
      after.block(current);
    });
    const c10::cuda::CUDAStreamGuard guard(stream);
    work();
  }

  void record(const std::function<void()>& work) {
    // The record has memory of its own for as long as it lives: what the warm-up took is given back first.
    const c10::cuda::CUDAStreamGuard guard(stream);
    c10::cuda::device_synchronize();
    c10::cuda::CUDACachingAllocator::emptyCache();
    const at::cuda::MempoolId_t pool = at::cuda::graph_pool_handle();
    auto recording = std::make_unique<at::cuda::CUDAGraph>();
    auto rows = std::make_unique<HeldCompositions>();
    try {
      // Other threads' calls are their own affair (communicators poll their events).
      recording->capture_begin(pool, cudaStreamCaptureModeThreadLocal);
      work();
      recording->capture_end();
      rows->stop();
      held = std::move(rows);
      graph = std::move(recording);
    } catch (const std::exception& error) {
      failed = true;
      note = "CUDA graphs: a step cannot be recorded (" + first_line(error.what()) + "), it is run each time instead";
      abandon(*recording, pool);
      recording.reset();
      c10::cuda::CUDACachingAllocator::emptyCache();
    }
  }

  // The stream leaves its capture, the allocators stop serving it from the record's memory and take that back. An
  // invalid capture ends with an error before LibTorch tells them.
  void abandon(at::cuda::CUDAGraph& recording, at::cuda::MempoolId_t pool) {
    bool ended = false;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(stream, &status) == cudaSuccess && status != cudaStreamCaptureStatusNone) {
      try {
        recording.capture_end();
        ended = true;
      } catch (const std::exception&) {
      }
    }
    if (!ended) {
      // Each raises where it was told already, or the capture had not begun: then there is nothing to take back.
      const auto attempt = [](const auto& tell) {
        try {
          tell();
        } catch (const std::exception&) {
        }
      };
      attempt([&] {
        c10::cuda::CUDACachingAllocator::endAllocateToPool(device, pool);
        c10::cuda::CUDACachingAllocator::releasePool(device, pool);
      });
      attempt([&] {
        at::HostAllocator* const host = at::getHostAllocator(at::kCUDA);
        host->end_allocate_to_pool(pool);
        host->release_pool(pool);
      });
    }
    cudaGetLastError();  // what an invalid capture left behind would be taken for the next call's error
  }

  const c10::DeviceIndex device;
  const c10::cuda::CUDAStream stream;
  int runs = 0;
  bool failed = false;
  std::unique_ptr<HeldCompositions> held;  // what the record reads of attention's
  std::unique_ptr<at::cuda::CUDAGraph> graph;
  std::string note;
};

StepGraph::StepGraph(at::Device device, bool wanted) {
  if (wanted && device.is_cuda()) state_ = std::make_unique<State>(device);
}
StepGraph::~StepGraph() = default;

void StepGraph::run(const std::function<void()>& work) {
  if (!state_ || state_->failed) {
    work();
    return;
  }
  if (!state_->graph && state_->runs == kWarmUp) state_->record(work);
  if (state_->graph) {
    state_->graph->replay();
  } else if (state_->failed) {
    work();
  } else {
    ++state_->runs;
    state_->on_stream(work);
  }
}

bool StepGraph::recorded() const { return state_ && state_->graph; }

std::string StepGraph::take_note() { return state_ ? std::exchange(state_->note, {}) : std::string(); }

}  // namespace annulus
