// Measures with LibTorch's profiling hooks how much CPU time of a thread matrix products and the attention kernel take.
// Used by ring.cc and train.cc.
#pragma once

#include <ATen/record_function.h>

namespace annulus {

// Counts from construction to destruction, on the thread that made it, which may have one OperatorClock at a time. Not
// thread safe.
class OperatorClock {
 public:
  OperatorClock();
  ~OperatorClock();
  OperatorClock(const OperatorClock&) = delete;
  OperatorClock& operator=(const OperatorClock&) = delete;

  double products() const;   // CPU seconds in mm, addmm and bmm
  double attention() const;  // CPU seconds in which the kernel computed tiles

 private:
  at::CallbackHandle handle_;
};

}  // namespace annulus
