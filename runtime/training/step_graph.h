// StepGraph: records the GPU's work of a step once and replays it (CUDA graphs), so that a step needs one launch
// instead of one for each kernel. training.cc uses it. In a build without CUDA the work is simply run. The CUDA
// implementation has never run. Not thread-safe.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <string>

namespace annulus {

class StepGraph {
 public:
  // If it is not `wanted`, or on a CPU, run() only calls its function.
  StepGraph(at::Device device, bool wanted);
  ~StepGraph();
  StepGraph(const StepGraph&) = delete;
  StepGraph& operator=(const StepGraph&) = delete;

  // The first three calls run `work`; the fourth records it, and from then on each call replays the record. `work` must
  // therefore do the same each time: it uses device memory at fixed addresses, never waits for the device, and needs no
  // computation on the host. If it cannot be recorded, every call runs it, and take_note() says why.
  void run(const std::function<void()>& work);

  bool recorded() const;
  // Returns a message for the user, once; otherwise an empty string.
  std::string take_note();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace annulus
