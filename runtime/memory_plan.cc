// See memory_plan.h. The terms follow the code that allocates: parameters.cc, model.cc, fused_ops.cc, composed_ops.cc
// and the executor; a change there is a change here, and tests/runtime/memory_plan_test.cc notices.
#include "runtime/memory_plan.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>
#include <utility>
#include <vector>

#include "attention/kernels/merge.h"
#include "attention/plan/layout.h"
#include "attention/plan/plan.h"
#include "runtime/fused_ops.h"
#include "runtime/model.h"
#include "runtime/training.h"

namespace annulus {
namespace {

constexpr int64_t kWide = 4;  // bytes of what is summed, updated and saved: fp32

std::string in_units(int64_t bytes, double unit) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f", static_cast<double>(bytes) / unit);
  return text.data();
}

// The most that one direction of a call holds in buffers at once, besides the keys and values that are the caller's or
// were kept. A row of K, V, dK or dV is that many bytes.
int64_t most_alive(const Program& program, const std::vector<Step>& steps, int64_t kv_row, int64_t grad_row) {
  const std::vector<Lifetime> lives = lifetimes(program, steps);
  std::vector<int64_t> change(steps.size() + 1);
  for (size_t b = 0; b < lives.size(); ++b) {
    const Buffer& buffer = program.buffers[b];
    const bool given = buffer.kind == BufferKind::kOwnKV || static_cast<int>(b) == program.saved;
    if (given || lives[b].last < lives[b].first) continue;
    const int64_t bytes = 2 * buffer.rows.rows() * (buffer.holds_gradient() ? grad_row : kv_row);
    change[static_cast<size_t>(lives[b].first)] += bytes;
    change[static_cast<size_t>(lives[b].last) + 1] -= bytes;
  }
  int64_t alive = 0, most = 0;
  for (const int64_t c : change) most = std::max(most, alive += c);
  return most;
}

}  // namespace

int64_t MemoryPlan::working() const { return std::max({loss, layer, attention}); }

int64_t MemoryPlan::total() const {
  return weights + gradients + optimizer + leaves + inputs + activations + working() + validation;
}

std::string MemoryPlan::text() const {
  const bool large = total() >= 1'000'000'000;
  const auto show = [&](int64_t bytes) { return in_units(bytes, large ? 1e9 : 1e6); };
  return show(total()) + (large ? " GB" : " MB") + " a rank planned: weights " + show(weights + leaves / 2) +
         ", gradients " + show(gradients + leaves / 2) + ", optimizer " + show(optimizer) + ", activations " +
         show(activations) + ", working memory " + show(working() + inputs + validation);
}

MemoryPlan plan_memory(const Config& c, const LayerRequests& layers, int context_ranks, int rank, bool gpu) {
  const ModelShape s = model_shape(c);
  const at::ScalarType dtype = compute_dtype(c);
  const auto e = static_cast<int64_t>(c10::elementSize(dtype));
  const bool copies = e != kWide;
  const bool loops = !gpu && !copies;  // fused_loops.h: no temporary tensors
  const int64_t batch = c.data.batch / c.mesh.data;
  const Layout layout =
      make_layout(parse_layout(c.attention.layout, "attention.layout"), c.data.context, context_ranks);
  const auto n = static_cast<int64_t>(layout.positions(rank).size());
  const int64_t rows = batch * n;
  const int64_t head_dim = s.head_dim();
  const int64_t hidden = rows * s.dim;                  // elements
  const int64_t kv = 2 * rows * s.kv_heads * head_dim;  // keys and values
  const int64_t wide_ffn = rows * s.ffn;
  const int64_t count = parameter_count(s);

  MemoryPlan plan;
  plan.weights = plan.gradients = count * kWide;
  plan.optimizer = 2 * count * kWide;
  plan.leaves = copies ? 2 * count * e : 0;
  plan.inputs = 2 * rows * 8 + n * head_dim * kWide;

  // What each layer keeps. Norms: their input and a number a row; products: their input. With recomputation the
  // residual stream before attention in two parts (added in the norm), and after it.
  const int64_t statistics = rows * kWide;
  const int64_t norm = hidden * e + statistics;
  const int64_t mlp = norm + hidden * e + 3 * wide_ffn * e;  // sum, normed, gate and up, their product
  const int64_t lse = rows * s.heads * kWide;
  int64_t saved = 0;  // keys and values of other ranks that the backward begins with
  int64_t transfers = 0;
  for (const size_t which : layers.of_layer) {
    PlanRequest request = layers.distinct[which];
    request.shape.batch = batch;
    request.pattern = of_batch_rows(std::move(request.pattern), 0, batch);
    const int64_t divided = output_divisor(request.pattern) == 1 ? 0 : hidden * e;
    int64_t buffers = kv * kWide;  // the gradients of own keys and values
    if (!is_adaptive(request.pattern) && context_ranks > 1) {
      const std::shared_ptr<const Program> program = cached_program(request, rank);
      if (program->saved >= 0) {
        saved += 2 * program->buffers[static_cast<size_t>(program->saved)].rows.rows() * head_dim * e;
      }
      buffers = most_alive(*program, program->backward, head_dim * e, head_dim * kWide);
    }
    transfers = std::max(transfers, buffers);
    const int64_t attention = (hidden + kv) * e + hidden * e + lse + divided;  // q, k, v, out
    plan.activations += attention + (c.model.recompute ? 3 * hidden * e : norm + hidden * e + mlp);
  }
  // The first layer has nothing to add in its norm, and composed operators keep its input itself.
  if (c.model.recompute) plan.activations -= (loops ? 1 : 2) * hidden * e;
  plan.activations += saved + norm;

  // The loss: the hidden states, their gradient, and the most that a chunk of logits takes at a time.
  const int64_t logits = std::min(rows, loss_chunk_rows(s.vocab, dtype)) * s.vocab;
  const int64_t head = s.vocab * s.dim;
  const bool several = logits < rows * s.vocab;
  const int64_t heads_gradient = head * kWide * (several ? 2 : 1);
  const int64_t logits_peak = (gpu ? 2 : 1) * logits * kWide + (several ? head * kWide : 0);
  const int64_t gradient_peak =
      logits * e + heads_gradient + (copies && !gpu ? (logits + logits / s.vocab * s.dim) * kWide : 0);
  const int64_t cast_peak = copies ? logits * (kWide + e) + (several ? head * kWide : 0) : 0;
  plan.loss = 2 * hidden * e + std::max({logits_peak, gradient_peak, cast_peak});

  // The MLP's backward begins with the gradient of its output. SwiGLU's holds its own input's gradient, its output's,
  // and one temporary where it is composed; the product of gate and up is no longer needed then.
  const int64_t swiglu = (loops ? 2 : 3) * wide_ffn * e;
  plan.layer = hidden * e + swiglu - norm + (c.model.recompute ? mlp - statistics + hidden * e : 0);

  // Attention's begins when the MLP's part is gone: gradients of the residual stream and of out, dq and the buffers in
  // fp32. On a CPU bf16 is computed in fp32: q, k, v, out and their gradients are there twice. On a GPU dq is one
  // operator's result, or of several ranks' keys the sum and the results that wait for it; dk and dv come besides,
  // where heads share a kv head for every head first, and the operator for fp32 wants keys and values so, too.
  const int64_t converted = copies && !gpu ? (3 * hidden + kv) * kWide : 0;
  const int64_t dq = !gpu                ? hidden * kWide
                     : context_ranks > 1 ? hidden * (kWide + static_cast<int64_t>(kMostParts) * e)
                                         : hidden * e;
  const int64_t operators = gpu ? kv * e + (s.heads > s.kv_heads ? (copies ? 2 : 4) * hidden * e : 0) : 0;
  plan.attention = 2 * hidden * e + dq + transfers + converted + operators - norm - (c.model.recompute ? 0 : mlp);

  // A recorded step keeps its memory (step_graph.h): what a validation takes comes besides.
  const bool recorded = gpu && c.cuda_graphs == "auto" && context_ranks == 1;
  const bool validated = c.validation.every > 0 && c.validation.batches > 0 && c.data.validation_fraction > 0;
  if (recorded && validated) plan.validation = (4 * hidden + 3 * wide_ffn) * e;
  return plan;
}

}  // namespace annulus
