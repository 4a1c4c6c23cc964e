// Tells which attention operators really computed something, as LibTorch's dispatcher saw them, whatever the executor
// was asked for. Used by gpu.cc and training.cc, so that each figure says whose it is.
#pragma once

#include <ATen/record_function.h>

#include <cstdint>
#include <map>
#include <string>

#include "attention/kernels/choose_kernel.h"

namespace annulus {

// The name of a kernel's own operator: that of the kernel, on CPUs "cpu_flash" for KernelKind::kEfficient.
std::string own_operator(KernelKind chosen, at::Device device);

// Counts the calls of attention operators, forwards and backwards, that its thread makes from construction to
// destruction. A thread may have one object at a time. Not thread safe.
class OperatorsSeen {
 public:
  OperatorsSeen();
  ~OperatorsSeen();
  OperatorsSeen(const OperatorsSeen&) = delete;
  OperatorsSeen& operator=(const OperatorsSeen&) = delete;

  // By name: "cudnn", "flash2", "flash3", "efficient" and "cpu_flash" are operators of libraries, "cpu" is the kernel
  // of attention/cpu_flash.
  std::map<std::string, int64_t> calls() const;

 private:
  at::CallbackHandle handle_;
};

// "cudnn", "cudnn and flash2"; "no operator" if there was none.
std::string text_of_operators(const std::map<std::string, int64_t>& calls);

}  // namespace annulus
