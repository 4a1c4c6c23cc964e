// Kernel: computes tiles. The executor hands it the tiles of a step; it merges them into the state (forward) or adds
// them into gradient accumulators (backward). Chosen in one place: choose_kernel.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "attention/plan/plan.h"
#include "attention/tiles/kernel_input.h"
#include "memory/charge.h"

namespace annulus {

// Under these names LibTorch's profiling hooks (at::RecordFunction) see the CPU kernel compute tiles.
inline constexpr char kForwardRecord[] = "annulus::tiles_forward";
inline constexpr char kBackwardRecord[] = "annulus::tiles_backward";

// What a call is of, before there are tensors: what a kernel says by that it will hold.
struct CallSize {
  int64_t batch = 0, queries = 0, heads = 0, kv_heads = 0, head_dim = 0;
  int64_t keys = 0;      // positions of the largest block of keys
  int64_t blocks = 1;    // of keys, in all steps
  bool gathers = false;  // tiles may be small ones, which composed kernels gather
  bool dropout =
      false;  // every tile is computed densely (attention/tiles/dense_tiles.h), but where that says otherwise
  at::ScalarType type = at::kFloat;

  int64_t element() const { return static_cast<int64_t>(c10::elementSize(type)); }
  int64_t query_elements() const { return batch * queries * heads * head_dim; }
  int64_t key_elements() const { return 2 * batch * keys * kv_heads * head_dim; }  // of a block's keys and values
  int64_t lse_elements() const { return batch * queries * heads; }
};

// One call's kernel state: running out and lse of this rank's queries, or the gradients being accumulated. q, out and
// their gradients are [B, rows, heads, D] as in attention.h. Not thread-safe: one state belongs to one call.
class Kernel {
 public:
  virtual ~Kernel() = default;

  using Poll = annulus::Poll;

  // Forward: begin, any number of forward() in the plan's order, finish.
  virtual void begin_forward(const at::Tensor& q, const KernelCall& call) = 0;
  // `tiles`: those of one step that read the block `keys`.
  virtual void forward(const KeyBlock& keys, std::span<const Tile> tiles, const Poll& poll) = 0;
  // out [B, n, H, D] in the accumulator's dtype or, where it was computed in one piece, in q's; lse [B, H, n] in the
  // accumulator's, -inf for rows with no key.
  virtual void finish_forward(at::Tensor& out, at::Tensor& lse) = 0;

  // Backward, from the MERGED out (q's dtype) and lse. `grads`: the accumulators that the tiles' dk and dv are added
  // to (or, where fresh, that become their sums, 0 elsewhere), in rows tile.grad_rows; it may hold other batch rows,
  // heads and positions than `keys`, but all that the tiles name.
  virtual void begin_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& out, const at::Tensor& lse,
                              const KernelCall& call) = 0;
  virtual void backward(const KeyBlock& keys, const KeyBlock& grads, std::span<const Tile> tiles, const Poll& poll) = 0;
  virtual at::Tensor finish_backward() = 0;  // dq, in one of the two dtypes, as out

  // What it takes for a call of this size (When::kForward and kBackward), besides what it is given and what it returns
  // in the inputs' dtype.
  virtual std::vector<Charge> charges(const CallSize& size) const = 0;

  // Elements of the largest dK and dV result that a backward tile held before it was added.
  int64_t peak_result_elements() const { return peak_result_elements_; }

 protected:
  int64_t peak_result_elements_ = 0;
};

}  // namespace annulus
