// Kernel: computes tiles. The executor hands it the tiles of a step; it merges them into the state (forward) or adds
// them into gradient accumulators (backward). Chosen in one place: choose_kernel.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "attention/plan/plan.h"

namespace annulus {

enum class KernelKind {
  kReference,  // dense fp64 over each tile: the oracle's cousin, any pattern, slow
  kAten,       // LibTorch's flash attention with its logsumexp
};

std::string_view to_string(KernelKind kind);  // "reference", "aten"
KernelKind parse_kernel(std::string_view name, std::string_view where);

// One call's kernel state: running out and lse of this rank's queries, or the gradients being accumulated. Tensors are
// [B, rows, heads, D] as in attention.h. Not thread-safe: one state belongs to one call.
class Kernel {
 public:
  virtual ~Kernel() = default;

  // `poll` is called between pieces of work of a few milliseconds, so that transfers move on.
  using Poll = std::function<void()>;

  // Forward: begin, any number of forward() in the plan's order, finish.
  virtual void begin_forward(const at::Tensor& q, double scale) = 0;
  // `tiles`: those of one step that read the buffer k, v.
  virtual void forward(const at::Tensor& k, const at::Tensor& v, std::span<const Tile> tiles, const Poll& poll) = 0;
  // out in the accumulator's dtype [B, n, H, D]; lse [B, H, n], -inf for rows with no key.
  virtual void finish_forward(at::Tensor& out, at::Tensor& lse) = 0;

  // Backward, from the MERGED out (q's dtype) and lse. dk and dv are accumulators of the key rows, added to.
  virtual void begin_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& out, const at::Tensor& lse,
                              double scale) = 0;
  virtual void backward(const at::Tensor& k, const at::Tensor& v, std::span<const Tile> tiles, at::Tensor& dk,
                        at::Tensor& dv, const Poll& poll) = 0;
  virtual at::Tensor finish_backward() = 0;  // dq in the accumulator's dtype

  // Elements of the largest dK and dV result that a backward tile held before it was added.
  int64_t peak_result_elements() const { return peak_result_elements_; }

 protected:
  int64_t peak_result_elements_ = 0;
};

// Raises Error(kUnavailable) when this build or device has no such kernel for these inputs, saying why and what to use.
std::unique_ptr<Kernel> make_kernel(KernelKind kind, const at::Tensor& q);

}  // namespace annulus
