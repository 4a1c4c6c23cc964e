// The operators of library_operators.h.
#include "attention/kernels/library_operators.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_efficient_attention_backward.h>
#include <ATen/ops/_efficient_attention_forward.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace annulus {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

bool causal(const Band& band) { return band.hi == 0; }

// [b, n, h, D] <-> [b, h, n, D]
at::Tensor swapped(const at::Tensor& t) { return t.transpose(1, 2); }

// Stands for the seed and the offset of dropout's draws, which operators require but do not read at rate 0.
at::Tensor no_draws(const at::Tensor& like) { return at::empty({}, like.options().dtype(at::kLong)); }

// The bytes of dk and dv for every query head, for operators that afterwards sum them over the heads that share a kv
// head.
int64_t gradients_of_shared_heads(const OperatorSize& s) {
  return s.heads > s.kv_heads ? 2 * s.batch * s.keys * s.heads * s.head_dim * s.element : 0;
}

class CpuFlash : public AttentionOperator {
 public:
  std::string_view name() const override { return "cpu_flash"; }
  Forward forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Band& band,
                  double scale) const override {
    const auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
        wide(q), wide(k), wide(v), /*dropout_p=*/0.0, causal(band), /*attn_mask=*/std::nullopt, scale);
    return {swapped(out).to(q.scalar_type()), lse};
  }

  int64_t backward_bytes(const OperatorSize& s) const override {
    const bool half = s.element < 4;
    return half ? 4 * s.batch * s.head_dim * (4 * s.queries * s.heads + 4 * s.keys * s.kv_heads) : 0;  // wide()
  }

  Backward backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const at::Tensor& out, const at::Tensor& lse, const Band& band, double scale) const override {
    const auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        wide(dout), wide(q), wide(k), wide(v), wide(out), lse, /*dropout_p=*/0.0, causal(band),
        /*attn_mask=*/std::nullopt, scale);
    return {swapped(dq), swapped(dk), swapped(dv)};
  }

 private:
  // In bf16 and fp16 the operator's backward would accumulate in these types.
  static at::Tensor wide(const at::Tensor& t) {
    const bool half = t.scalar_type() == at::kBFloat16 || t.scalar_type() == at::kHalf;
    return swapped(half ? t.to(at::kFloat) : t);
  }
};

class Cudnn : public AttentionOperator {
 public:
  std::string_view name() const override { return "cudnn"; }
  // Single queries or keys are refused or, in some versions, computed wrongly (pytorch#193893). On Hopper GPUs dq is
  // NaN if the last 64 of a tile's 128 keys do not exist, nothing masks them, and a row's lse is below -88
  // (pytorch#196678).
  bool takes(const Question& c) const override {
    return c.queries > 1 && c.keys > 1 && (!c.backward || c.causal || c.keys % 128 != 64);
  }
  bool prepares_shapes() const override { return true; }

  Forward forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Band& band,
                  double scale) const override {
    const auto result = at::_scaled_dot_product_cudnn_attention(
        swapped(q), swapped(k), swapped(v), /*attn_bias=*/std::nullopt, /*compute_log_sumexp=*/true,
        /*dropout_p=*/0.0, causal(band), /*return_debug_mask=*/false, scale);
    return {swapped(std::get<0>(result)), std::get<1>(result).view({q.size(0), q.size(2), q.size(1)})};
  }

  // From cudnn-frontend's workspace of a backward: dq is accumulated in fp32, beside a number for each row.
  int64_t backward_bytes(const OperatorSize& s) const override {
    return 4 * s.batch * s.heads * s.queries * (s.head_dim + 1) + gradients_of_shared_heads(s);
  }

  Backward backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const at::Tensor& out, const at::Tensor& lse, const Band& band, double scale) const override {
    const at::Tensor none;
    const auto [dq, dk, dv] = at::_scaled_dot_product_cudnn_attention_backward(
        swapped(dout), swapped(q), swapped(k), swapped(v), swapped(out), lse.unsqueeze(-1), no_draws(q), no_draws(q),
        /*attn_bias=*/none, /*cum_seq_q=*/none, /*cum_seq_k=*/none, q.size(1), k.size(1), /*dropout_p=*/0.0,
        causal(band), scale);
    return {swapped(dq), swapped(dk), swapped(dv)};
  }
};

// FlashAttention aligns windows at the bottom right: the last query is aligned with the last key. A side of -1 is
// unbounded. It also treats a right side of at least the number of keys as unbounded, which is correct as long as there
// are no more queries than keys.
struct Window {
  int64_t left = -1, right = -1;

  Window(const Band& band, int64_t queries, int64_t keys) {
    if (!band.unbounded_below()) left = keys - queries - band.lo;
    if (!band.unbounded_above()) right = band.hi - (keys - queries);
  }
  bool causal() const { return left < 0 && right == 0; }
};

class Flash2 : public AttentionOperator {
 public:
  std::string_view name() const override { return "flash2"; }
  bool any_band() const override { return true; }

  Forward forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Band& band,
                  double scale) const override {
    const Window window(band, q.size(1), k.size(1));
    const auto result = at::_flash_attention_forward(q, k, v, /*cum_seq_q=*/std::nullopt, /*cum_seq_k=*/std::nullopt,
                                                     q.size(1), k.size(1), /*dropout_p=*/0.0, window.causal(),
                                                     /*return_debug_mask=*/false, scale, window.left, window.right);
    return {std::get<0>(result), std::get<1>(result)};
  }

  // From LibTorch's flash_api.cpp: dq is accumulated in fp32. In deterministic mode there is one accumulator for each
  // of several parts of the keys, as many as keep the GPU busy. Rows are rounded up to 128.
  int64_t backward_bytes(const OperatorSize& s) const override {
    const int64_t rows = (s.queries + 127) / 128 * 128, width = rounded_head(s.head_dim);
    const int64_t problems = s.batch * s.heads;
    const int64_t parts = s.deterministic ? std::max<int64_t>(1, (s.multiprocessors + problems - 1) / problems) : 1;
    const int64_t elements = problems * rows * width;
    // With more elements backward() below computes two halves, and holds their results besides the whole one.
    const bool halves = elements >= int64_t{1} << 31 && problems > 1;
    const int64_t results =
        halves ? (s.queries * s.heads + 2 * s.keys * s.kv_heads) * s.batch * s.head_dim * s.element : 0;
    return 4 * parts * (halves ? int64_t{1} << 31 : elements) + 4 * problems * rows + gradients_of_shared_heads(s) +
           results;
  }

  Backward backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const at::Tensor& out, const at::Tensor& lse, const Band& band, double scale) const override {
    // The operator's offsets into the accumulator of dq have 32 bits. If they do not suffice, half of the batch, of the
    // kv heads or of the query heads is computed at a time.
    const int64_t rows = (q.size(1) + 127) / 128 * 128, width = rounded_head(q.size(3));
    if (q.size(0) * q.size(2) * rows * width >= int64_t{1} << 31 && q.size(0) * q.size(2) > 1) {
      const int64_t dim = q.size(0) > 1 ? 0 : 2;
      const bool shared = dim == 2 && k.size(2) == 1;  // both halves read the only kv head
      const auto half = [&](bool second) {
        const auto cut = [&](const at::Tensor& t, int64_t along, int64_t units) {
          const int64_t unit = t.size(along) / units, first = units / 2 * unit;
          return second ? t.narrow(along, first, t.size(along) - first) : t.narrow(along, 0, first);
        };
        const int64_t units = shared ? q.size(2) : k.size(dim);
        const auto of_keys = [&](const at::Tensor& t) { return shared ? t : cut(t, dim, units); };
        return backward(cut(dout, dim, units), cut(q, dim, units), of_keys(k), of_keys(v), cut(out, dim, units),
                        cut(lse, dim == 2 ? 1 : 0, units).contiguous(), band, scale);
      };
      const Backward a = half(false), b = half(true);
      if (shared) return {at::cat({a.dq, b.dq}, dim), a.dk + b.dk, a.dv + b.dv};
      return {at::cat({a.dq, b.dq}, dim), at::cat({a.dk, b.dk}, dim), at::cat({a.dv, b.dv}, dim)};
    }
    const Window window(band, q.size(1), k.size(1));
    const at::Tensor none;
    const auto [dq, dk, dv] = at::_flash_attention_backward(
        dout, q, k, v, out, lse, /*cum_seq_q=*/none, /*cum_seq_k=*/none, q.size(1), k.size(1), /*dropout_p=*/0.0,
        window.causal(), no_draws(q), no_draws(q), scale, window.left, window.right);
    return {dq, dk, dv};
  }

 private:
  // The kernels' head sizes are multiples of 32 up to 128, and of 64 above.
  static int64_t rounded_head(int64_t dim) {
    const int64_t multiple = dim <= 128 ? 32 : 64;
    return (dim + multiple - 1) / multiple * multiple;
  }
};

// New versions of the package add arguments to its schemas, so arguments are passed by name and the others keep their
// defaults. attention/kernels/detect.cc has checked that these names exist.
class Flash3 : public AttentionOperator {
 public:
  std::string_view name() const override { return "flash3"; }
  bool any_band() const override { return true; }

  Forward forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Band& band,
                  double scale) const override {
    const Window window(band, q.size(1), k.size(1));
    const auto result =
        call("flash_attn_3::fwd", flash3_forward_arguments(),
             {q, k, v, scale, window.causal(), window.left, window.right, deterministic_only() ? 1 : 0});
    return {result[0].toTensor(), result[1].toTensor()};
  }

  // From the package's flash_api.cpp: dq is accumulated in fp32, and so are dk and dv if heads share them.
  int64_t backward_bytes(const OperatorSize& s) const override {
    const int64_t queries = (s.queries + 127) / 128 * 128, keys = (s.keys + 127) / 128 * 128;
    const int64_t width = (s.head_dim + 31) / 32 * 32;
    return 4 * s.batch * (s.heads * queries * (width + 2) + (s.heads > s.kv_heads ? 2 * s.kv_heads * keys * width : 0));
  }

  Backward backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const at::Tensor& out, const at::Tensor& lse, const Band& band, double scale) const override {
    const Window window(band, q.size(1), k.size(1));
    const at::Tensor dq = at::empty_like(q), dk = at::empty_like(k), dv = at::empty_like(v);
    call(
        "flash_attn_3::bwd", flash3_backward_arguments(),
        {dout, q, k, v, out, lse, dq, dk, dv, scale, window.causal(), window.left, window.right, deterministic_only()});
    return {dq, dk, dv};
  }

 private:
  static std::vector<c10::IValue> call(const char* name, const std::vector<std::string>& names,
                                       const std::vector<c10::IValue>& values) {
    const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
    std::vector<c10::IValue> stack;
    for (const c10::Argument& argument : handle.schema().arguments()) {
      const auto found = std::find(names.begin(), names.end(), argument.name());
      stack.push_back(found != names.end() ? values[static_cast<size_t>(found - names.begin())]
                                           : argument.default_value().value_or(c10::IValue()));
    }
    handle.callBoxed(stack);
    return stack;
  }
};

class Efficient : public AttentionOperator {
 public:
  std::string_view name() const override { return "efficient"; }
  Forward forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Band& band,
                  double scale) const override {
    const auto result = at::_efficient_attention_forward(
        q, repeated(k, q.size(2)), repeated(v, q.size(2)), /*bias=*/std::nullopt, /*cu_seqlens_q=*/std::nullopt,
        /*cu_seqlens_k=*/std::nullopt, /*max_seqlen_q=*/std::nullopt, /*max_seqlen_k=*/std::nullopt,
        /*dropout_p=*/0.0, mask(band), /*compute_log_sumexp=*/true, scale);
    return {std::get<0>(result), std::get<1>(result).narrow(2, 0, q.size(1))};
  }

  // Keys and values are repeated for every head, and so are their gradients; lse is padded.
  int64_t backward_bytes(const OperatorSize& s) const override {
    const int64_t lse = 4 * s.batch * s.heads * ((s.queries + 31) / 32 * 32);
    return lse + (s.heads > s.kv_heads ? 2 : 0) * 2 * s.batch * s.keys * s.heads * s.head_dim * s.element;
  }

  Backward backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const at::Tensor& out, const at::Tensor& lse, const Band& band, double scale) const override {
    const int64_t heads = q.size(2), kv_heads = k.size(2);
    // The operator reads the rows of lse in runs of 32, and assumes without a check that out is contiguous.
    const at::Tensor padded = at::constant_pad_nd(lse, {0, (32 - lse.size(2) % 32) % 32}, kInfinity);
    const auto result = at::_efficient_attention_backward(
        dout, q, repeated(k, heads), repeated(v, heads), /*bias=*/std::nullopt, out.contiguous(),
        /*cu_seqlens_q=*/std::nullopt,
        /*cu_seqlens_k=*/std::nullopt, q.size(1), k.size(1), padded, /*dropout_p=*/0.0, no_draws(q), no_draws(q),
        mask(band), /*bias_requires_grad=*/false, scale);
    const auto summed = [&](const at::Tensor& grad) {
      return heads == kv_heads ? grad : grad.unflatten(2, {kv_heads, heads / kv_heads}).sum(3);
    };
    return {std::get<0>(result), summed(std::get<1>(result)), summed(std::get<2>(result))};
  }

 private:
  static int64_t mask(const Band& band) { return causal(band) ? 1 : 0; }  // 1: causal from the top left
  static at::Tensor repeated(const at::Tensor& kv, int64_t heads) {
    return kv.size(2) == heads ? kv : kv.repeat_interleave(heads / kv.size(2), 2);
  }
};

}  // namespace

bool deterministic_only() {
  const at::Context& context = at::globalContext();
  return context.deterministicAlgorithms() && !context.deterministicAlgorithmsWarnOnly();
}

std::shared_ptr<const AttentionOperator> cpu_flash_operator() { return std::make_shared<CpuFlash>(); }
std::shared_ptr<const AttentionOperator> cudnn_operator() { return std::make_shared<Cudnn>(); }
std::shared_ptr<const AttentionOperator> flash2_operator() { return std::make_shared<Flash2>(); }
std::shared_ptr<const AttentionOperator> flash3_operator() { return std::make_shared<Flash3>(); }
std::vector<std::string> flash3_forward_arguments() {
  return {"q", "k", "v", "softmax_scale", "is_causal", "window_size_left", "window_size_right", "num_splits"};
}
std::vector<std::string> flash3_backward_arguments() {
  return {"dout",
          "q",
          "k",
          "v",
          "out",
          "softmax_lse",
          "dq",
          "dk",
          "dv",
          "softmax_scale",
          "is_causal",
          "window_size_left",
          "window_size_right",
          "deterministic"};
}
std::shared_ptr<const AttentionOperator> efficient_operator() { return std::make_shared<Efficient>(); }

}  // namespace annulus
