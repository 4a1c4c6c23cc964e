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

#include "attention/kernels/dropout.h"
#include "attention/plan/plan.h"

namespace annulus {

enum class KernelKind {
  kReference,  // dense fp64 over each tile: the oracle's cousin, any pattern, slow
  kAten,       // flash attention on LibTorch's matrix products, CPU
  kEfficient,  // a library's operators, composed (operator_kernel.h): LibTorch's efficient attention; on CPUs its flash
  kCudnn,      // likewise: cuDNN, GPU; bands and small blocks by FlashAttention 2
  kFlash2,     // likewise: FlashAttention 2, GPU
  kFlash3,     // likewise: FlashAttention 3, Hopper GPUs
  kAuto,       // the fastest that can be used for the inputs; see choose_kernel
};

// Under these names LibTorch's profiling hooks (at::RecordFunction) see the CPU kernel compute tiles.
inline constexpr char kForwardRecord[] = "annulus::tiles_forward";
inline constexpr char kBackwardRecord[] = "annulus::tiles_backward";

std::string_view to_string(KernelKind kind);  // "reference", "aten", "efficient", "cudnn", "flash2", "flash3", "auto"
KernelKind parse_kernel(std::string_view name, std::string_view where);

// A block of a key/value buffer, or of a gradient buffer with dk and dv: which batch rows and kv heads its tensors
// hold.
struct KeyBlock {
  at::Tensor k, v;  // [batch.count, rows, heads.count, D]
  Span batch;       // global batch rows
  Span heads;       // global kv heads
  // Of gradients: the tensors hold nothing yet. The kernel sets them, which is less than adding to zeros.
  bool fresh = false;
};

// What is alike for all tiles of a call.
struct KernelCall {
  double scale = 1;
  int64_t group = 1;  // H / Hk: query heads that read one kv head
  Dropout dropout;
};

// One call's kernel state: running out and lse of this rank's queries, or the gradients being accumulated. q, out and
// their gradients are [B, rows, heads, D] as in attention.h. Not thread-safe: one state belongs to one call.
class Kernel {
 public:
  virtual ~Kernel() = default;

  // `poll` is called between pieces of work of a few milliseconds, so that transfers move on.
  using Poll = std::function<void()>;

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

  // Elements of the largest dK and dV result that a backward tile held before it was added.
  int64_t peak_result_elements() const { return peak_result_elements_; }

 protected:
  int64_t peak_result_elements_ = 0;
};

// What is used for such inputs, and why; what there is: detect.h. `asked` kAuto: the fastest that can be used. A choice
// that falls back says so in `reason`. Raises Error(kUnavailable) where no kernel takes them, saying why and what to
// use. Thread-safe.
struct KernelChoice {
  KernelKind kind = KernelKind::kAten;  // never kAuto
  std::string reason;                   // one line
};
KernelChoice choose_kernel(KernelKind asked, at::DeviceType device, at::ScalarType type, int64_t head_dim,
                           bool dropout);

// Of tensors on a GPU with these abilities: what choose_kernel comes to, for a test to ask about GPUs that are not
// there.
struct GpuAbilities;
KernelChoice choose_gpu_kernel(KernelKind asked, const GpuAbilities& gpu, at::ScalarType type, int64_t head_dim,
                               bool dropout);

// The chosen kernel; its reason goes to the log once. Raises as choose_kernel.
std::unique_ptr<Kernel> make_kernel(KernelKind kind, const at::Tensor& q, bool dropout = false);

}  // namespace annulus
