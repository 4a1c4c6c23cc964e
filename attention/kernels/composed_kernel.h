// The kernel for GPUs: tiles composed of calls of a library's attention operators (composition.h says which). Made by
// choose_kernel.cc; runs on any device that its operators run on. No intermediate is larger than a gathered call
// (CompositionInput::most_gathered): nothing of queries x keys.
#pragma once

#include <memory>
#include <vector>

#include "attention/composition/composition.h"
#include "attention/kernels/kernel.h"
#include "attention/operators/attention_operator.h"

namespace annulus {

struct ComposedKernelOptions {
  CompositionInput limits;  // most_gathered and fill are used
};

// `operators`: by preference; together they take every size, and one that takes a band takes any size.
std::unique_ptr<Kernel> make_composed_kernel(std::vector<std::shared_ptr<const AttentionOperator>> operators,
                                             const ComposedKernelOptions& options = {});

// The lists of rows on a device that kernels use from its making until stop() stay there as long as it lives: a
// captured CUDA graph reads them whenever it is replayed. Thread-safe.
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
