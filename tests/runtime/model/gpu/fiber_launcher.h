// For tests: runs the kernels of runtime/model/gpu/ on a CPU as a GPU would, one thread of a GPU after the other. Every
// thread of a group is a fiber, which runs until its kernel waits for the others. The sums are made in the order of
// runtime/model/gpu/cuda_group.h.
//
// A kernel that forgets to wait reads what other threads have not written yet, or have overwritten: threads run in
// their order or backwards, and results must not depend on it. If some threads of a group wait and others have ended,
// which may hang on a GPU, start() throws std::logic_error.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/model/gpu/launcher.h"

namespace annulus::testing {

class FiberLauncher : public gpu::Launcher {
 public:
  // What the kernels that were started were compiled for.
  struct Started {
    bool vectors = false;  // it moves 16 bytes at once, and not single elements
    int warps = 0;         // of a group
    int64_t groups = 0;
    friend bool operator==(const Started&, const Started&) = default;
  };

  void start(const gpu::NormArguments& a, c10::Device) const override;
  void start(const gpu::NormGradientArguments& a, c10::Device) const override;
  void start(const gpu::ColumnArguments& a, c10::Device) const override;
  void start(const gpu::RotaryArguments& a, c10::Device) const override;
  void start(const gpu::SwiGluArguments& a, c10::Device) const override;
  void start(const gpu::CrossEntropyArguments& a, c10::Device) const override;

  mutable std::vector<Started> started;
  bool backwards = false;  // the last thread and the last group run first
};

// While it exists, tensors on the CPU are computed by kernels.
class OnFibers {
 public:
  OnFibers() { gpu::set_cpu_launcher(&launcher); }
  ~OnFibers() { gpu::set_cpu_launcher(nullptr); }
  OnFibers(const OnFibers&) = delete;
  OnFibers& operator=(const OnFibers&) = delete;

  FiberLauncher launcher;
};

}  // namespace annulus::testing
