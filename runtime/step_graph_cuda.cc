// See step_graph.h.
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <exception>
#include <utility>

#include "attention/kernels/operator_kernel.h"
#include "runtime/step_graph.h"

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
    {
      const c10::cuda::CUDAStreamGuard guard(stream);
      work();
    }
    after.record(stream);
    after.block(current);
  }

  void record(const std::function<void()>& work) {
    // The record has memory of its own for as long as it lives: what the warm-up took is given back first.
    c10::cuda::device_synchronize();
    c10::cuda::CUDACachingAllocator::emptyCache();
    const c10::cuda::CUDAStreamGuard guard(stream);
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
    }
  }

  // The stream leaves its capture, the allocator stops serving it from the record's memory.
  void abandon(at::cuda::CUDAGraph& recording, at::cuda::MempoolId_t pool) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(stream, &status) == cudaSuccess && status != cudaStreamCaptureStatusNone) {
      try {
        recording.capture_end();
        return;
      } catch (const std::exception&) {
        // An invalid capture ends with an error; the allocator may not have been told.
      }
    }
    try {
      c10::cuda::CUDACachingAllocator::endAllocateToPool(device, pool);
    } catch (const std::exception&) {
      // It had been told, or the capture had not begun.
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
