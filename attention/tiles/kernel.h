// Kernel: the interface of code that computes tiles. The executor gives it the tiles of each step; the kernel merges
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

// The names under which LibTorch's profiling hooks (at::RecordFunction) see the CPU kernel compute tiles.
inline constexpr char kForwardRecord[] = "annulus::tiles_forward";
inline constexpr char kBackwardRecord[] = "annulus::tiles_backward";

// The sizes of a call, before there are tensors. A kernel computes from them what it will hold (Kernel::charges).
struct CallSize {
  int64_t batch = 0, queries = 0, heads = 0, kv_heads = 0, head_dim = 0;
  int64_t keys = 0;      // the positions of the largest block of keys
  int64_t blocks = 1;    // the number of blocks of keys in all steps
  bool gathers = false;  // whether tiles may be small; composed kernels gather small ones
  // Whether pairs are dropped. Kernels other than `cpu` then compute every tile densely
  // (attention/tiles/dense_tiles.h).
  bool dropout = false;
  at::ScalarType type = at::kFloat;

  int64_t element() const { return static_cast<int64_t>(c10::elementSize(type)); }
  int64_t query_elements() const { return batch * queries * heads * head_dim; }
  int64_t key_elements() const { return 2 * batch * keys * kv_heads * head_dim; }  // for keys and values
  int64_t lse_elements() const { return batch * queries * heads; }
};

// The kernel state of one call: running out and lse of this rank's queries, or the gradients that are being
// accumulated. q, out and their gradients are [B, rows, heads, D] as in attention/execution/attention.h. Not thread
// safe; each call has its own object.
class Kernel {
 public:
  virtual ~Kernel() = default;

  using Poll = annulus::Poll;

  // In the forward, begin_forward() is followed by any number of forward() in the plan's order and one
  // finish_forward().
  virtual void begin_forward(const at::Tensor& q, const KernelCall& call) = 0;
  // Computes tiles of one step that all read the block `keys`. Calls `poll`, which may be empty, between pieces of
  // work.
  virtual void forward(const KeyBlock& keys, std::span<const Tile> tiles, const Poll& poll) = 0;
  // Sets out [B, n, H, D], in the accumulator's dtype or, depending on the kernel, in q's, and lse [B, H, n] in the
  // accumulator's dtype, -inf for rows without keys.
  virtual void finish_forward(at::Tensor& out, at::Tensor& lse) = 0;

  // The backward has the same order of calls. It gets the merged out (in q's dtype) and lse. The tiles' dk and dv are
  // added to the accumulators `grads`, in the rows tile.grad_rows. If these are fresh, they become the sums, and 0
  // where there are none. `grads` may hold other batch rows, heads and positions than `keys`, but must hold all that
  // the tiles name.
  virtual void begin_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& out, const at::Tensor& lse,
                              const KernelCall& call) = 0;
  virtual void backward(const KeyBlock& keys, const KeyBlock& grads, std::span<const Tile> tiles, const Poll& poll) = 0;
  virtual at::Tensor finish_backward() = 0;  // dq, in the accumulator's dtype or in q's

  // May be called instead of backward(), if the gradients of a block, which holds the same rows as `keys`, come from
  // these tiles alone. If the kernel has dk and dv as the results of one operation, it returns these tensors, so that
  // nothing is copied to an accumulator and rounded again. Otherwise it has computed nothing, and backward() must be
  // called.
  struct KeyGradients {
    at::Tensor dk, dv;  // like keys.k and keys.v, in the inputs' dtype or in the accumulator's
  };
  virtual std::optional<KeyGradients> whole_backward(const KeyBlock& /*keys*/, std::span<const Tile> /*tiles*/,
                                                     const Poll& /*poll*/) {
    return std::nullopt;
  }

  // The memory that a call of this size takes (When::kForward and kBackward), in addition to what the kernel is given
  // and what it returns in the inputs' dtype.
  virtual std::vector<Charge> charges(const CallSize& size) const = 0;

  // The number of elements of the largest dK and dV result that a backward held before it was added.
  int64_t peak_result_elements() const { return peak_result_elements_; }

 protected:
  int64_t peak_result_elements_ = 0;
};

}  // namespace annulus
