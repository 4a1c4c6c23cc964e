// Notes the operators that really computed something, and their CPU time, as LibTorch's dispatcher and the CPU kernel
// report them. Used by ring.cc and train.cc for the share of attention and matrix products, and by gpu/, so that each
// figure says whose it is.
#pragma once

#include <ATen/record_function.h>

#include <set>
#include <string>

namespace annulus {

// Of attention: "cudnn", "flash2", "flash3", "efficient" and "cpu_flash" are operators of libraries, "cpu" is the
// kernel of attention/kernels/cpu.
using OperatorNames = std::set<std::string>;

// Notes the calls from construction to destruction, in all threads of the process, which may have one object at a time.
// Thread safe.
class OperatorsSeen {
 public:
  OperatorsSeen();
  ~OperatorsSeen();
  OperatorsSeen(const OperatorsSeen&) = delete;
  OperatorsSeen& operator=(const OperatorsSeen&) = delete;

  OperatorNames names() const;
  // CPU seconds of the threads that called them.
  double attention_seconds() const;
  double product_seconds() const;  // matrix products

 private:
  at::CallbackHandle handle_;
};

// "cudnn", "cudnn and flash2"; "no operator" if there was none.
std::string text_of_operators(const OperatorNames& names);

}  // namespace annulus
