// Kernel: the interface of code that computes tiles. The executor passes the tiles of each step; the kernel merges
// their results into its state (forward) or adds them to gradient accumulators (backward). choose_kernel.h chooses the
// kernel of a call.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <span>
#include <vector>

#include "attention/plan/plan.h"
#include "attention/tiles/kernel_input.h"
#include "memory/charge.h"

namespace annulus {

// The names of the CPU kernel's events in LibTorch's profiler (at::RecordFunction).
inline constexpr char kForwardRecord[] = "annulus::tiles_forward";
inline constexpr char kBackwardRecord[] = "annulus::tiles_backward";

// The sizes of a call, from which Kernel::charges computes the memory before there are tensors.
struct CallSize {
  int64_t batch = 0, queries = 0, heads = 0, kv_heads = 0, head_dim = 0;
  int64_t keys = 0;      // positions of the largest block of keys
  int64_t blocks = 1;    // of keys, over all steps
  bool gathers = false;  // whether tiles may be small; composed kernels gather small ones
  // With dropout or a soft cap, kernels other than `cpu` compute every tile densely (attention/tiles/dense_tiles.h).
  bool dropout = false, softcap = false;
  bool masked = false;  // whether tiles may have a mask of tokens; the same holds for these tiles
  at::ScalarType type = at::kFloat;

  int64_t element() const { return static_cast<int64_t>(c10::elementSize(type)); }
  int64_t query_elements() const { return batch * queries * heads * head_dim; }
  int64_t key_elements() const { return 2 * batch * keys * kv_heads * head_dim; }  // for keys and values
  int64_t lse_elements() const { return batch * queries * heads; }
};

// The kernel and its state in one call: running out and lse of this rank's queries, or accumulated gradients. q, out
// and their gradients are [B, rows, heads, D] as in attention/execution/attention.h. Not thread safe; each call has its
// own object.
class Kernel {
 public:
  virtual ~Kernel() = default;

  using Poll = annulus::Poll;

  // In the forward, call begin_forward(), then forward() any number of times in the plan's order, then
  // finish_forward().
  virtual void begin_forward(const at::Tensor& q, const KernelCall& call) = 0;
  // Computes tiles of one step that all read the block `keys`. Calls `poll`, if not empty, between pieces of work.
  virtual void forward(const KeyBlock& keys, std::span<const Tile> tiles, const Poll& poll) = 0;
  // Sets out [B, n, H, D], in the accumulator's dtype or q's, as the kernel chooses, and lse [B, H, n] in the
  // accumulator's dtype. Rows without keys have lse -inf.
  virtual void finish_forward(at::Tensor& out, at::Tensor& lse) = 0;

  // The backward has the same order of calls. begin_backward() takes the merged out (in q's dtype) and lse. backward()
  // adds the tiles' dk and dv to the accumulators `grads`, in the rows tile.grad_rows; fresh accumulators count as 0.
  // `grads` may have other batch rows, heads and positions than `keys`, but must have all that the tiles name.
  virtual void begin_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& out, const at::Tensor& lse,
                              const KernelCall& call) = 0;
  virtual void backward(const KeyBlock& keys, const KeyBlock& grads, std::span<const Tile> tiles, const Poll& poll) = 0;
  virtual at::Tensor finish_backward() = 0;  // dq, in the accumulator's dtype or in q's

  // May be called instead of backward() if these tiles alone contribute to a gradient block with the same rows as
  // `keys`. A kernel that gets dk and dv from one operation returns these tensors, which saves an accumulator and its
  // rounding. Otherwise it computes nothing and returns nullopt, and backward() must be called.
  struct KeyGradients {
    at::Tensor dk, dv;  // like keys.k and keys.v, in the inputs' dtype or in the accumulator's
  };
  virtual std::optional<KeyGradients> whole_backward(const KeyBlock& /*keys*/, std::span<const Tile> /*tiles*/,
                                                     const Poll& /*poll*/) {
    return std::nullopt;
  }

  // Returns the memory that a call of this size takes (When::kForward and kBackward) besides its inputs and its results
  // in the inputs' dtype.
  virtual std::vector<Charge> charges(const CallSize& size) const = 0;

  // Returns the number of elements of the largest dK and dV result that a backward held before adding it.
  int64_t peak_result_elements() const { return peak_result_elements_; }

 protected:
  int64_t peak_result_elements_ = 0;
};

}  // namespace annulus
