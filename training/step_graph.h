// StepGraph: the GPU's work of a step recorded once and replayed (CUDA graphs), so that a step costs one launch instead
// of hundreds. Used by training.cc. Of the two implementations, that of a build without CUDA runs the work as it is.
// Not thread-safe.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <string>

namespace annulus {

class StepGraph {
 public:
  // Where not `wanted`, or on a CPU, run() calls its function and that is all.
  StepGraph(at::Device device, bool wanted);
  ~StepGraph();
  StepGraph(const StepGraph&) = delete;
  StepGraph& operator=(const StepGraph&) = delete;

  // The first calls run `work`; then one records it and all later ones replay that record. `work` therefore does the
  // same each time: it reads and writes device memory that stays where it is, never waits for the device, and leaves
  // nothing to be done on the host. Where it cannot be recorded it is run each time, and take_note() says why.
  void run(const std::function<void()>& work);

  bool recorded() const;
  // What there is to tell the user, once.
  std::string take_note();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace annulus
