// How much of a thread's CPU time LibTorch's matrix products and the attention kernel take, told by LibTorch's
// profiling hooks. For benchmarks.
#pragma once

#include <ATen/record_function.h>

namespace annulus {

// Counts from construction to destruction, on the thread that made it. Not for several threads at once.
class OperatorClock {
 public:
  OperatorClock();
  ~OperatorClock();
  OperatorClock(const OperatorClock&) = delete;
  OperatorClock& operator=(const OperatorClock&) = delete;

  double products() const;   // seconds in mm, addmm, bmm
  double attention() const;  // seconds of the kernel computing tiles

 private:
  at::CallbackHandle handle_;
};

}  // namespace annulus
