// The kernel for GPUs: composes tiles from calls of a library's attention operators (composition.h). Used by
// choose_kernel.cc. It runs on every device that its operators support; CPU tests run it, no GPU has yet. No
// intermediate result is larger than a gathered call (CompositionInput::most_gathered), so none has the size of queries
// x keys.
#pragma once

#include <memory>
#include <vector>

#include "attention/kernels/composition.h"
#include "attention/kernels/operator_list.h"
#include "attention/tiles/kernel.h"

namespace annulus {

struct ComposedKernelOptions {
  CompositionInput limits;  // only most_gathered and fill are used
  // The limit in bytes of results that are held back to be merged in one pass; a single result may be larger. With 64
  // heads of 128 in bf16, that is eight blocks of up to 16,384 rows.
  int64_t most_waiting = int64_t{2} << 30;
  // Must outlive the kernel. Tests pass their own.
  OperatorHistory* history = &OperatorHistory::of_process();
};

// `operators` are in order of preference. Together they must support every size, and one with any_band() must support
// any size.
std::unique_ptr<Kernel> make_composed_kernel(std::vector<std::shared_ptr<const AttentionOperator>> operators,
                                             const ComposedKernelOptions& options = {});

// Keeps alive, for its own lifetime, the row lists on the device that kernels use between its construction and stop(),
// because each replay of a captured CUDA graph reads them. Used by runtime/training/step_graph_cuda.cc. Thread safe.
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
