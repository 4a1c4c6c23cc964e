// See step_graph.h.
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <exception>
#include <utility>

#include "attention/kernels/composed_kernel.h"
#include "runtime/training/step_graph.h"

namespace annulus {
namespace {

// The number of calls before the one that records. Libraries allocate workspaces and choose algorithms in the first.
constexpr int kWarmUp = 3;

// Returns the first line of a message of LibTorch; the rest is advice for programmers and a stack trace.
std::string first_line_of(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

struct StepGraph::State {
  explicit State(at::Device d)
      : device(d.has_index() ? d.index() : c10::cuda::current_device()),
        stream(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device)) {}

  // Runs `work` on `stream`, ordered after what the current stream has been given so far and before what it will be
  // given. Recording needs a stream that is not the default one, and the calls before it must have used that same
  // stream. The backward runs on another thread, but on the stream of the forward.
  void on_stream(const std::function<void()>& work) {
    const c10::cuda::CUDAStream current = c10::cuda::getCurrentCUDAStream(device);
    at::cuda::CUDAEvent before, after;
    before.record(current);
    before.block(stream);
    const auto join = [&] {
      after.record(stream);
      after.block(current);
    };
    try {
      const c10::cuda::CUDAStreamGuard guard(stream);
      work();
    } catch (...) {
      // What `work` has launched by now still reads and writes memory. If the device has failed, so do these calls, but
      // the error of `work` is the one that says why.
      try {
        join();
      } catch (const c10::Error&) {
      }
      throw;
    }
    join();
  }

  void record(const std::function<void()>& work) {
    // The record has its own memory for its whole lifetime, so the memory of the first calls is freed before.
    const c10::cuda::CUDAStreamGuard guard(stream);
    c10::cuda::device_synchronize();
    c10::cuda::CUDACachingAllocator::emptyCache();
    const at::cuda::MempoolId_t pool = at::cuda::graph_pool_handle();
    auto recording = std::make_unique<at::cuda::CUDAGraph>();
    auto rows = std::make_unique<HeldCompositions>();
    try {
      // In this mode CUDA calls of other threads, such as communicators that poll events, do not invalidate the
      // capture.
      recording->capture_begin(pool, cudaStreamCaptureModeThreadLocal);
      work();
      recording->capture_end();
      rows->stop();
      held = std::move(rows);
      graph = std::move(recording);
    } catch (const std::exception& error) {
      failed = true;
      note = "CUDA graphs: a step cannot be recorded (" + first_line_of(error.what()) + "), so no step is replayed";
      abandon(*recording, pool);
      recording.reset();
      c10::cuda::CUDACachingAllocator::emptyCache();
    }
  }

  // Ends the capture, and makes the allocators stop using the record's memory and take it back. If the capture is
  // invalid, ending it fails before LibTorch has told the allocators, so this does so itself.
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
      // Each attempt raises if the allocator was told already or the capture had not begun; there is then nothing to
      // do.
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
    cudaGetLastError();  // clears the error of an invalid capture, which the next call would otherwise report
    if (!ended) release_generator();
  }

  // Makes the device's random generator usable after a recording that could not be ended. LibTorch 2.11 marks the
  // generator as in capture when a recording begins, removes the mark only where capture_end() succeeds, and refuses to
  // draw numbers outside a recording meanwhile. So this makes a recording that succeeds. Later versions of LibTorch
  // keep the mark with each recording and do not need this (PyTorch's issue 171263 and pull request 176752).
  void release_generator() {
    try {
      at::Tensor number = at::zeros({1}, at::TensorOptions(at::kFloat).device(at::kCUDA, device));
      at::cuda::CUDAGraph trivial;
      trivial.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
      number.zero_();
      trivial.capture_end();
    } catch (const std::exception&) {
      cudaGetLastError();
      note += "; the device's random generator may be unusable from here on";
    }
  }

  const c10::DeviceIndex device;
  const c10::cuda::CUDAStream stream;
  int runs = 0;
  bool failed = false;
  std::unique_ptr<HeldCompositions> held;  // memory of attention's compositions that the record reads
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
