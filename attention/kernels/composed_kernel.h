// The kernel for GPUs, which computes tiles with calls of a library's attention operators (composition.h finds the
// calls). choose_kernel.cc makes it. It runs on every device that its operators run on; CPU tests run it, no GPU
// has yet. No intermediate result is larger than a gathered call (CompositionInput::most_gathered), so none has the
// size of queries x keys.
#pragma once

#include <memory>
#include <vector>

#include "attention/kernels/composition.h"
#include "attention/kernels/operator_list.h"
#include "attention/tiles/kernel.h"

namespace annulus {

struct ComposedKernelOptions {
  CompositionInput limits;  // only most_gathered and fill are used
  // The most bytes of results that wait to be merged in one pass; a single result may be larger. With 64 heads of 128
  // in bf16, eight blocks of up to 16,384 rows wait.
  int64_t most_waiting = int64_t{2} << 30;
  // What the operators did so far; it must outlive the kernel. Tests give one of their own.
  OperatorHistory* history = &OperatorHistory::of_process();
};

// `operators` are in order of preference. Together they must take every size, and one that takes any band must take any
// size.
std::unique_ptr<Kernel> make_composed_kernel(std::vector<std::shared_ptr<const AttentionOperator>> operators,
                                             const ComposedKernelOptions& options = {});

// Keeps the lists of rows on a device that kernels use between its construction and stop() alive for as long as it
// lives itself, because a captured CUDA graph reads them whenever it is replayed. Used by
// runtime/training/step_graph_cuda.cc. Thread safe.
class HeldCompositions {
 public:
  HeldCompositions();
  ~HeldCompositions() { stop(); }
  HeldCompositions(const HeldCompositions&) = delete;
  HeldCompositions& operator=(const HeldCompositions&) = delete;

  void stop();

  using List = std::vector<std::shared_ptr<const void>>;

 private:
  std::shared_ptr<List> list_;
};

}  // namespace annulus
