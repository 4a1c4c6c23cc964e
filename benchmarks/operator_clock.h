// How much of a thread's CPU time LibTorch's matrix products and attention operators take, told by LibTorch's own
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
  double attention() const;  // seconds in the flash attention operators

 private:
  at::CallbackHandle handle_;
};

}  // namespace annulus
