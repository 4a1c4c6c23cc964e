// See choose_ops.h.
#include "runtime/model/choose_ops.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "runtime/model/gpu/launcher.h"

namespace annulus {
namespace {

gpu::Element element_of(at::ScalarType type) {
  return type == at::kBFloat16 ? gpu::Element::kBFloat16
         : type == at::kHalf   ? gpu::Element::kHalf
                               : gpu::Element::kFloat;
}

// Whether parts that begin every `elements` elements of these tensors begin at multiples of kVectorBytes. An undefined
// tensor does not count.
bool aligned(int64_t elements, std::initializer_list<const at::Tensor*> tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor* t) {
    return !t->defined() || (reinterpret_cast<uintptr_t>(t->const_data_ptr()) % gpu::kVectorBytes == 0 &&
                             elements * static_cast<int64_t>(t->element_size()) % gpu::kVectorBytes == 0);
  });
}

const void* data_of(const at::Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; }

template <typename Arguments>
void start(const Arguments& arguments, const at::Tensor& on) {
  gpu::launcher_for(on.device().type())->start(arguments, on.device());
}

at::Tensor empty_fp32(at::IntArrayRef sizes, const at::Tensor& like) {
  return at::empty(sizes, like.options().dtype(at::kFloat));
}

gpu::NormRows all_rows(const at::Tensor& x) {
  return {.rows = x.size(0), .dim = static_cast<int>(x.size(1)), .stride = x.size(1)};
}

// The rows of `count` heads of each row of x.
gpu::NormRows heads_of(const at::Tensor& x, int64_t count, int64_t dim, const at::Tensor& inv_rms) {
  return {.rows = x.size(0) * count,
          .dim = static_cast<int>(dim),
          .inner = count,
          .stride = x.size(1),
          .statistics_stride = inv_rms.size(1)};
}

// Fills in what describes the tensors together, starts the kernel and adds up the weight's gradient in fp32.
at::Tensor start_gradient(gpu::NormGradientArguments a, const NormWeight& of) {
  const at::Tensor& weight = of.weight;
  a.weight = weight.const_data_ptr();
  a.offset = static_cast<float>(of.offset);
  a.element = element_of(weight.scalar_type());
  a.workers = gpu::norm_workers(a.at.rows, a.at.dim, a.element, a.aligned);
  const at::Tensor partial = empty_fp32({a.workers, a.at.dim}, weight);
  a.partial = partial.data_ptr<float>();
  start(a, weight);
  at::Tensor dweight = empty_fp32(weight.sizes(), weight);
  start(
      gpu::ColumnArguments{
          .values = a.partial, .rows = a.workers, .columns = a.at.dim, .sums = dweight.data_ptr<float>()},
      weight);
  return dweight;
}

class KernelOps : public DecoderOps {
 public:
  RmsNorm add_rms_norm(const at::Tensor& x, const at::Tensor& delta, const NormWeight& of, double eps) const override {
    const at::Tensor& weight = of.weight;
    const RmsNorm r{delta.defined() ? at::empty_like(x) : x, at::empty_like(x), empty_fp32({x.size(0)}, x)};
    start(gpu::NormArguments{.element = element_of(x.scalar_type()),
                             .aligned = aligned(x.size(1), {&x, &delta, &weight, &r.sum, &r.y}),
                             .at = all_rows(x),
                             .x = x.const_data_ptr(),
                             .delta = data_of(delta),
                             .weight = weight.const_data_ptr(),
                             .offset = static_cast<float>(of.offset),
                             .eps = static_cast<float>(eps),
                             .sum = delta.defined() ? r.sum.data_ptr() : nullptr,
                             .y = r.y.data_ptr(),
                             .inv_rms = r.inv_rms.data_ptr<float>()},
          x);
    return r;
  }

  RmsNormGradient add_rms_norm_backward(const at::Tensor& dy, const at::Tensor& dsum, const at::Tensor& sum,
                                        const NormWeight& weight, const at::Tensor& inv_rms) const override {
    const at::Tensor dx = at::empty_like(sum);
    return {dx, start_gradient({.aligned = aligned(sum.size(1), {&dy, &dsum, &sum, &weight.weight, &dx}),
                                .at = all_rows(sum),
                                .dy = dy.const_data_ptr(),
                                .dsum = data_of(dsum),
                                .sum = sum.const_data_ptr(),
                                .inv_rms = inv_rms.const_data_ptr<float>(),
                                .dx = dx.data_ptr()},
                               weight)};
  }

  HeadNormed head_norm(const at::Tensor& qkv, const NormWeight& q_weight, const NormWeight& k_weight, int64_t heads,
                       int64_t kv_heads, double eps) const override {
    const int64_t d = q_weight.weight.size(0), v = (heads + kv_heads) * d;
    const HeadNormed r{at::empty_like(qkv), empty_fp32({qkv.size(0), heads + kv_heads}, qkv)};
    for (const bool keys : {false, true}) {
      const NormWeight& of = keys ? k_weight : q_weight;
      const at::Tensor &weight = of.weight, x = keys ? qkv.narrow(1, heads * d, kv_heads * d) : qkv;
      const at::Tensor y = keys ? r.y.narrow(1, heads * d, kv_heads * d) : r.y;
      start(gpu::NormArguments{.element = element_of(qkv.scalar_type()),
                               .aligned = aligned(d, {&x, &weight, &y}),
                               .at = heads_of(qkv, keys ? kv_heads : heads, d, r.inv_rms),
                               .x = x.const_data_ptr(),
                               .weight = weight.const_data_ptr(),
                               .offset = static_cast<float>(of.offset),
                               .eps = static_cast<float>(eps),
                               .y = y.data_ptr(),
                               .inv_rms = r.inv_rms.data_ptr<float>() + (keys ? heads : 0)},
            qkv);
    }
    r.y.narrow(1, v, kv_heads * d).copy_(qkv.narrow(1, v, kv_heads * d));
    return r;
  }

  HeadNormGradient head_norm_backward(const at::Tensor& dy, const at::Tensor& qkv, const NormWeight& q_weight,
                                      const NormWeight& k_weight, const at::Tensor& inv_rms,
                                      int64_t heads) const override {
    const int64_t kv_heads = inv_rms.size(1) - heads, d = q_weight.weight.size(0), v = (heads + kv_heads) * d;
    HeadNormGradient r{.dqkv = at::empty_like(qkv), .dq_weight = {}, .dk_weight = {}};
    for (const bool keys : {false, true}) {
      const int64_t from = keys ? heads * d : 0;
      const NormWeight& weight = keys ? k_weight : q_weight;
      const at::Tensor x = qkv.narrow(1, from, d), g = dy.narrow(1, from, d);
      const at::Tensor dx = r.dqkv.narrow(1, from, d);
      (keys ? r.dk_weight : r.dq_weight) =
          start_gradient({.aligned = aligned(d, {&g, &x, &weight.weight, &dx}),
                          .at = heads_of(qkv, keys ? kv_heads : heads, d, inv_rms),
                          .dy = g.const_data_ptr(),
                          .sum = x.const_data_ptr(),
                          .inv_rms = inv_rms.const_data_ptr<float>() + (keys ? heads : 0),
                          .dx = dx.data_ptr()},
                         weight);
    }
    r.dqkv.narrow(1, v, kv_heads * d).copy_(dy.narrow(1, v, kv_heads * d));
    return r;
  }

  Heads rotary_split(const at::Tensor& qkv, const at::Tensor& cosine, const at::Tensor& sine, int64_t heads,
                     int64_t kv_heads) const override {
    const int64_t n = cosine.size(0), d = cosine.size(1) * 2, batch = qkv.size(0) / n;
    Heads to{at::empty({batch, n, heads, d}, qkv.options()), at::empty({batch, n, kv_heads, d}, qkv.options()),
             at::empty({batch, n, kv_heads, d}, qkv.options())};
    start_rotary(qkv, to, cosine, sine, /*backward=*/false);
    return to;
  }

  at::Tensor rotary_split_backward(const Heads& gradients, const at::Tensor& cosine,
                                   const at::Tensor& sine) const override {
    const at::Tensor &q = gradients.q, &k = gradients.k;
    at::Tensor dqkv = at::empty({q.size(0) * q.size(1), (q.size(2) + 2 * k.size(2)) * q.size(3)}, q.options());
    start_rotary(dqkv, gradients, cosine, sine, /*backward=*/true);
    return dqkv;
  }

  at::Tensor glu(const at::Tensor& gate_up, Activation activation) const override {
    at::Tensor out = at::empty({gate_up.size(0), gate_up.size(1) / 2}, gate_up.options());
    start_glu(gate_up, {}, out, activation);
    return out;
  }

  at::Tensor glu_backward(const at::Tensor& dout, const at::Tensor& gate_up, Activation activation) const override {
    at::Tensor din = at::empty_like(gate_up);
    start_glu(gate_up, dout, din, activation);
    return din;
  }

  // The gradient lies in the memory of the logits, so with a narrower dtype its rows are not adjacent.
  CrossEntropy cross_entropy(at::Tensor logits, const at::Tensor& targets, const at::Tensor& weights, double scale,
                             std::optional<at::ScalarType> gradient) const override {
    const int64_t rows = logits.size(0), vocab = logits.size(1);
    const at::Tensor losses = empty_fp32({rows}, logits);
    start(gpu::CrossEntropyArguments{.aligned = aligned(vocab, {&logits}),
                                     .logits = logits.data_ptr<float>(),
                                     .targets = targets.const_data_ptr<int64_t>(),
                                     .weights = weights.defined() ? weights.const_data_ptr<float>() : nullptr,
                                     .losses = losses.data_ptr<float>(),
                                     .with_gradient = gradient.has_value(),
                                     .gradient = element_of(gradient.value_or(at::kFloat)),
                                     .scale = static_cast<float>(scale),
                                     .rows = rows,
                                     .vocab = static_cast<int>(vocab)},
          logits);
    return {losses.sum(at::kDouble), gradient ? logits.view(*gradient).narrow(1, 0, vocab) : at::Tensor()};
  }

 private:
  static void start_rotary(const at::Tensor& qkv, const Heads& split, const at::Tensor& cosine, const at::Tensor& sine,
                           bool backward) {
    const int64_t half = cosine.size(1);
    start(gpu::RotaryArguments{.element = element_of(qkv.scalar_type()),
                               .aligned = aligned(half, {&qkv, &split.q, &split.k, &split.v, &cosine, &sine}),
                               .backward = backward,
                               // Which ones are written depends on `backward`.
                               .qkv = const_cast<void*>(qkv.const_data_ptr()),
                               .q = const_cast<void*>(split.q.const_data_ptr()),
                               .k = const_cast<void*>(split.k.const_data_ptr()),
                               .v = const_cast<void*>(split.v.const_data_ptr()),
                               .cosine = cosine.const_data_ptr<float>(),
                               .sine = sine.const_data_ptr<float>(),
                               .rows = qkv.size(0),
                               .positions = cosine.size(0),
                               .heads = static_cast<int>(split.q.size(2)),
                               .kv_heads = static_cast<int>(split.k.size(2)),
                               .head_dim = static_cast<int>(2 * half)},
          qkv);
  }

  static void start_glu(const at::Tensor& gate_up, const at::Tensor& dout, const at::Tensor& result,
                        Activation activation) {
    const int64_t ffn = gate_up.size(1) / 2;
    start(gpu::SwiGluArguments{.element = element_of(gate_up.scalar_type()),
                               .aligned = aligned(ffn, {&gate_up, &dout, &result}),
                               .gelu = activation == Activation::kGeluTanh,
                               .gate_up = gate_up.const_data_ptr(),
                               .dout = data_of(dout),
                               .result = result.data_ptr(),
                               .rows = gate_up.size(0),
                               .ffn = static_cast<int>(ffn)},
          gate_up);
  }
};

}  // namespace

bool kernels_take(const at::Tensor& t) {
  constexpr int64_t kMost = int64_t{1} << 30;
  const at::ScalarType type = t.scalar_type();
  return gpu::launcher_for(t.device().type()) != nullptr &&
         (type == at::kFloat || type == at::kBFloat16 || type == at::kHalf) && t.is_contiguous() && t.numel() > 0 &&
         t.numel() / t.size(0) < kMost;
}

const DecoderOps& kernel_ops() {
  static const KernelOps ops;
  return ops;
}

int64_t kernel_norm_sums(int64_t rows, int64_t dim, at::ScalarType dtype) {
  const gpu::Element element = element_of(dtype);
  const bool aligned = dim * gpu::bytes_of(element) % gpu::kVectorBytes == 0;
  return gpu::norm_workers(rows, dim, element, aligned) * dim * static_cast<int64_t>(sizeof(float));
}

}  // namespace annulus
