// See fused_loops.h.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "runtime/model/fused_loops.cc"
// versions.h must come first.
// clang-format off
#include "common/simd/versions.h"
#include "common/simd/exponential-inl.h"
// clang-format on

#include <algorithm>
#include <cmath>

#include "runtime/model/fused_loops.h"

HWY_BEFORE_NAMESPACE();
namespace annulus {
namespace fused {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using simd::HWY_NAMESPACE::exponential;
using simd::HWY_NAMESPACE::load_some;
using simd::HWY_NAMESPACE::store_some;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
constexpr D d;

// Calls body(load, store) for each vector of n elements, beginning with i = 0: load(x) is x[i...], with zeros beyond
// the end; store(v, x) writes v there and leaves alone what lies beyond the end.
template <typename Body>
HWY_INLINE void for_vectors(int64_t n, const Body& body) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    body([i](const float* x) HWY_ATTR { return hn::LoadU(d, x + i); },
         [i](V v, float* x) HWY_ATTR { hn::StoreU(v, d, x + i); });
  }
  if (i < n) {
    const auto rest = static_cast<size_t>(n - i);
    body([i, rest](const float* x) HWY_ATTR { return load_some(d, x + i, rest, 0); },
         [i, rest](V v, float* x) HWY_ATTR { store_some(v, d, x + i, rest); });
  }
}

HWY_INLINE float sum_of(V v) { return hn::GetLane(hn::SumOfLanes(d, v)); }
HWY_INLINE V vector(float x) { return hn::Set(d, x); }
HWY_INLINE V sigmoid(V x) { return hn::Div(vector(1), hn::Add(vector(1), exponential(d, hn::Neg(x)))); }

void norm(const float* x, const float* delta, NormFactor factor, float eps, int64_t rows, int64_t dim, float* sum,
          float* y, float* inv_rms) {
  const V offset = vector(factor.offset);
  for (int64_t r = 0; r < rows; ++r, x += dim, sum += dim, y += dim) {
    V squares = hn::Zero(d);
    for_vectors(dim, [&](const auto& load, const auto& store) HWY_ATTR {
      const V s = delta != nullptr ? hn::Add(load(x), load(delta)) : load(x);
      store(s, sum);
      squares = hn::MulAdd(s, s, squares);
    });
    if (delta != nullptr) delta += dim;
    const float inverse = 1.0F / std::sqrt(sum_of(squares) / static_cast<float>(dim) + eps);
    inv_rms[r] = inverse;
    const V inv = vector(inverse);
    for_vectors(dim, [&](const auto& load, const auto& store) HWY_ATTR {
      store(hn::Mul(hn::Mul(load(sum), inv), hn::Add(offset, load(factor.weight))), y);
    });
  }
}

void norm_backward(const float* dy, const float* dsum, const float* sum, NormFactor factor, const float* inv_rms,
                   int64_t rows, int64_t dim, float* dx, float* dweight) {
  const V offset = vector(factor.offset);
  for (int64_t r = 0; r < rows; ++r, dy += dim, sum += dim, dx += dim) {
    const float inverse = inv_rms[r];
    V dot = hn::Zero(d);
    for_vectors(dim, [&](const auto& load, const auto&) HWY_ATTR {
      dot = hn::MulAdd(hn::Mul(load(dy), hn::Add(offset, load(factor.weight))), load(sum), dot);
    });
    const V back = vector(sum_of(dot) * inverse * inverse * inverse / static_cast<float>(dim)), inv = vector(inverse);
    for_vectors(dim, [&](const auto& load, const auto& store) HWY_ATTR {
      const V g = hn::Mul(load(dy), inv), s = load(sum);
      store(hn::MulAdd(g, s, load(dweight)), dweight);
      const V through = hn::NegMulAdd(s, back, hn::Mul(g, hn::Add(offset, load(factor.weight))));
      store(dsum != nullptr ? hn::Add(load(dsum), through) : through, dx);
    });
    if (dsum != nullptr) dsum += dim;
  }
}

HWY_INLINE void rotate(const float* in, const float* cosine, const float* sine, float sign, int64_t half, float* out) {
  const V turn = vector(sign);
  for_vectors(half, [&](const auto& load, const auto& store) HWY_ATTR {
    const V a = load(in), b = load(in + half), c = load(cosine), s = hn::Mul(load(sine), turn);
    store(hn::NegMulAdd(b, s, hn::Mul(a, c)), out);
    store(hn::MulAdd(b, c, hn::Mul(a, s)), out + half);
  });
}

void rotary(const float* qkv, const float* cosine, const float* sine, const RotaryShape& shape, int64_t first_row,
            int64_t rows, float* q, float* k, float* v) {
  const int64_t size = shape.head_dim, half = size / 2;
  for (int64_t r = first_row; r < first_row + rows; ++r) {
    const float* in = qkv + r * (shape.heads + 2 * shape.kv_heads) * size;
    const float* c = cosine + (r % shape.positions) * half;
    const float* s = sine + (r % shape.positions) * half;
    for (int64_t h = 0; h < shape.heads; ++h, in += size) {
      rotate(in, c, s, 1.0F, half, q + (r * shape.heads + h) * size);
    }
    for (int64_t h = 0; h < shape.kv_heads; ++h, in += size) {
      rotate(in, c, s, 1.0F, half, k + (r * shape.kv_heads + h) * size);
    }
    std::copy_n(in, shape.kv_heads * size, v + r * shape.kv_heads * size);
  }
}

void rotary_backward(const float* dq, const float* dk, const float* dv, const float* cosine, const float* sine,
                     const RotaryShape& shape, int64_t first_row, int64_t rows, float* dqkv) {
  const int64_t size = shape.head_dim, half = size / 2;
  for (int64_t r = first_row; r < first_row + rows; ++r) {
    float* out = dqkv + r * (shape.heads + 2 * shape.kv_heads) * size;
    const float* c = cosine + (r % shape.positions) * half;
    const float* s = sine + (r % shape.positions) * half;
    for (int64_t h = 0; h < shape.heads; ++h, out += size) {
      rotate(dq + (r * shape.heads + h) * size, c, s, -1.0F, half, out);
    }
    for (int64_t h = 0; h < shape.kv_heads; ++h, out += size) {
      rotate(dk + (r * shape.kv_heads + h) * size, c, s, -1.0F, half, out);
    }
    std::copy_n(dv + r * shape.kv_heads * size, shape.kv_heads * size, out);
  }
}

// Both activations are x sigmoid(z(x)): SiLU with z = x, and GELU's approximation, as (1 + tanh(u)) / 2 = sigmoid(2 u),
// with z = 2 sqrt(2 / pi) (x + 0.044715 x^3). The derivative is sigmoid(z) (1 + x (1 - sigmoid(z)) z').
struct Silu {
  static HWY_INLINE V z(V x) { return x; }
  static HWY_INLINE V times_slope(V /*x*/, V y) { return y; }
};
struct GeluTanh {
  static constexpr float kLinear = 1.5957691216057308F, kCubic = kLinear * 0.044715F;
  static HWY_INLINE V z(V x) { return hn::Mul(x, hn::MulAdd(hn::Mul(x, x), vector(kCubic), vector(kLinear))); }
  static HWY_INLINE V times_slope(V x, V y) {
    return hn::Mul(y, hn::MulAdd(hn::Mul(x, x), vector(3 * kCubic), vector(kLinear)));
  }
};

template <typename Of>
void glu(const float* gate_up, int64_t rows, int64_t ffn, float* out) {
  for (int64_t r = 0; r < rows; ++r, gate_up += 2 * ffn, out += ffn) {
    for_vectors(ffn, [&](const auto& load, const auto& store) HWY_ATTR {
      const V g = load(gate_up);
      store(hn::Mul(hn::Mul(g, sigmoid(Of::z(g))), load(gate_up + ffn)), out);
    });
  }
}

template <typename Of>
void glu_backward(const float* dout, const float* gate_up, int64_t rows, int64_t ffn, float* dgate_up) {
  for (int64_t r = 0; r < rows; ++r, dout += ffn, gate_up += 2 * ffn, dgate_up += 2 * ffn) {
    for_vectors(ffn, [&](const auto& load, const auto& store) HWY_ATTR {
      const V g = load(gate_up), s = sigmoid(Of::z(g)), o = load(dout), os = hn::Mul(o, s);
      const V rest = Of::times_slope(g, hn::Sub(vector(1), s));
      store(hn::Mul(os, g), dgate_up + ffn);
      store(hn::Mul(hn::Mul(os, load(gate_up + ffn)), hn::MulAdd(g, rest, vector(1))), dgate_up);
    });
  }
}

double loss(const float* logits, const int64_t* targets, const float* weights, int64_t rows, int64_t vocab, float scale,
            float* dlogits) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  double loss = 0;
  for (int64_t r = 0; r < rows; ++r, logits += vocab) {
    if (targets[r] < 0) {
      if (dlogits != nullptr) dlogits = std::fill_n(dlogits, vocab, 0.0F);
      continue;
    }
    const float weight = weights != nullptr ? weights[r] : 1.0F, scaled = weight * scale;
    V most = vector(logits[0]);
    int64_t i = 0;
    for (; i + lanes <= vocab; i += lanes) most = hn::Max(hn::LoadU(d, logits + i), most);
    float top = hn::GetLane(hn::MaxOfLanes(d, most));
    for (; i < vocab; ++i) top = logits[i] > top ? logits[i] : top;
    const float target = logits[targets[r]];
    const V shift = vector(top);
    V sums = hn::Zero(d);
    float sum = 0;
    for (i = 0; i + lanes <= vocab; i += lanes) {
      const V e = exponential(d, hn::Sub(hn::LoadU(d, logits + i), shift));
      sums = hn::Add(sums, e);
      if (dlogits != nullptr) hn::StoreU(e, d, dlogits + i);
    }
    if (i < vocab) {
      const auto rest = static_cast<size_t>(vocab - i);
      // Beyond the end it is e^-infinity = 0.
      const V e = exponential(d, hn::Sub(load_some(d, logits + i, rest, -INFINITY), shift));
      sums = hn::Add(sums, e);
      if (dlogits != nullptr) store_some(e, d, dlogits + i, rest);
    }
    sum = sum_of(sums);
    if (dlogits != nullptr) {
      const V factor = vector(scaled / sum);
      for_vectors(
          vocab, [&](const auto& load, const auto& store) HWY_ATTR { store(hn::Mul(load(dlogits), factor), dlogits); });
      dlogits[targets[r]] -= scaled;
      dlogits += vocab;
    }
    loss += weight * (std::log(static_cast<double>(sum)) + top - target);
  }
  return loss;
}

constexpr Loops kLoops = {norm,          norm_backward,          rotary, rotary_backward, glu<Silu>, glu_backward<Silu>,
                          glu<GeluTanh>, glu_backward<GeluTanh>, loss};

}  // namespace HWY_NAMESPACE
}  // namespace fused
}  // namespace annulus
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace annulus::fused {

const Loops& loops() {
  static const Loops& chosen = ANNULUS_VERSION(fused, kLoops);
  return chosen;
}

}  // namespace annulus::fused
#endif  // HWY_ONCE
