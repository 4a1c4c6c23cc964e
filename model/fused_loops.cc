// See fused_loops.h. Built with -O3 -fopenmp-simd: `omp simd` allows the reductions to be vectorised, nothing else of
// fast-math is switched on.
#include "model/fused_loops.h"

#include <algorithm>
#include <bit>
#include <cmath>

// One version per instruction set. Sanitizers start after the resolvers that this needs.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define ANNULUS_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define ANNULUS_CLONES
#endif
#define ANNULUS_INLINE inline __attribute__((always_inline))

namespace annulus::fused {
namespace {

// e^x to about 1e-7 relative, without a branch, so that loops over it vectorise: 2^n * e^r with r in +-ln2/2 and
// Cephes' polynomial. Below -87 it stays at e^-87 (1.6e-38), above 88 at e^88.
ANNULUS_INLINE float fast_exp(float x) {
  x = x < -87.0F ? -87.0F : x;
  x = x > 88.0F ? 88.0F : x;
  const float kRound = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer
  const float t = x * 1.44269504088896341F + kRound;
  const float n = t - kRound;
  const float r = (x - n * 0.693359375F) + n * 2.12194440e-4F;
  float p = 1.9875691500e-4F;
  p = p * r + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  p = p * r * r + r + 1.0F;
  // Unsigned: what an infinity or a NaN makes of it is defined, too, and p carries the NaN on.
  const uint32_t exponent = (std::bit_cast<uint32_t>(t) - std::bit_cast<uint32_t>(kRound) + 127U) << 23;
  return p * std::bit_cast<float>(exponent);
}

ANNULUS_INLINE void rotate(const float* in, const float* cosine, const float* sine, float sign, int64_t half,
                           float* out) {
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const float a = in[i];
    const float b = in[i + half];
    const float s = sine[i] * sign;
    out[i] = a * cosine[i] - b * s;
    out[i + half] = b * cosine[i] + a * s;
  }
}

ANNULUS_INLINE void copy(const float* in, int64_t n, float* out) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = in[i];
}

}  // namespace

ANNULUS_CLONES
void add_rms_norm(const float* x, const float* delta, const float* weight, float eps, int64_t rows, int64_t dim,
                  float* sum, float* y, float* inv_rms) {
  for (int64_t r = 0; r < rows; ++r, x += dim, sum += dim, y += dim) {
    float squares = 0;
    if (delta != nullptr) {
#pragma omp simd reduction(+ : squares)
      for (int64_t i = 0; i < dim; ++i) {
        const float s = x[i] + delta[i];
        sum[i] = s;
        squares += s * s;
      }
      delta += dim;
    } else {
#pragma omp simd reduction(+ : squares)
      for (int64_t i = 0; i < dim; ++i) {
        sum[i] = x[i];
        squares += x[i] * x[i];
      }
    }
    const float inv = 1.0F / std::sqrt(squares / static_cast<float>(dim) + eps);
    inv_rms[r] = inv;
#pragma omp simd
    for (int64_t i = 0; i < dim; ++i) y[i] = sum[i] * inv * weight[i];
  }
}

ANNULUS_CLONES
void add_rms_norm_backward(const float* dy, const float* dsum, const float* sum, const float* weight,
                           const float* inv_rms, int64_t rows, int64_t dim, float* dx, float* dweight) {
  for (int64_t r = 0; r < rows; ++r, dy += dim, sum += dim, dx += dim) {
    const float inv = inv_rms[r];
    float dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t i = 0; i < dim; ++i) dot += dy[i] * weight[i] * sum[i];
    const float back = dot * inv * inv * inv / static_cast<float>(dim);
    if (dsum != nullptr) {
#pragma omp simd
      for (int64_t i = 0; i < dim; ++i) {
        const float g = dy[i] * inv;
        dweight[i] += g * sum[i];
        dx[i] = dsum[i] + g * weight[i] - sum[i] * back;
      }
      dsum += dim;
    } else {
#pragma omp simd
      for (int64_t i = 0; i < dim; ++i) {
        const float g = dy[i] * inv;
        dweight[i] += g * sum[i];
        dx[i] = g * weight[i] - sum[i] * back;
      }
    }
  }
}

ANNULUS_CLONES
void rotary_split(const float* qkv, const float* cosine, const float* sine, const RotaryShape& shape, int64_t first_row,
                  int64_t rows, float* q, float* k, float* v) {
  const int64_t d = shape.head_dim;
  const int64_t half = d / 2;
  for (int64_t r = first_row; r < first_row + rows; ++r) {
    const float* in = qkv + r * (shape.heads + 2 * shape.kv_heads) * d;
    const float* c = cosine + (r % shape.positions) * half;
    const float* s = sine + (r % shape.positions) * half;
    for (int64_t h = 0; h < shape.heads; ++h, in += d) rotate(in, c, s, 1.0F, half, q + (r * shape.heads + h) * d);
    for (int64_t h = 0; h < shape.kv_heads; ++h, in += d) {
      rotate(in, c, s, 1.0F, half, k + (r * shape.kv_heads + h) * d);
    }
    copy(in, shape.kv_heads * d, v + r * shape.kv_heads * d);
  }
}

ANNULUS_CLONES
void rotary_split_backward(const float* dq, const float* dk, const float* dv, const float* cosine, const float* sine,
                           const RotaryShape& shape, int64_t first_row, int64_t rows, float* dqkv) {
  const int64_t d = shape.head_dim;
  const int64_t half = d / 2;
  for (int64_t r = first_row; r < first_row + rows; ++r) {
    float* out = dqkv + r * (shape.heads + 2 * shape.kv_heads) * d;
    const float* c = cosine + (r % shape.positions) * half;
    const float* s = sine + (r % shape.positions) * half;
    for (int64_t h = 0; h < shape.heads; ++h, out += d) rotate(dq + (r * shape.heads + h) * d, c, s, -1.0F, half, out);
    for (int64_t h = 0; h < shape.kv_heads; ++h, out += d) {
      rotate(dk + (r * shape.kv_heads + h) * d, c, s, -1.0F, half, out);
    }
    copy(dv + r * shape.kv_heads * d, shape.kv_heads * d, out);
  }
}

ANNULUS_CLONES
void swiglu(const float* gate_up, int64_t rows, int64_t ffn, float* out) {
  for (int64_t r = 0; r < rows; ++r, gate_up += 2 * ffn, out += ffn) {
    const float* up = gate_up + ffn;
#pragma omp simd
    for (int64_t i = 0; i < ffn; ++i) out[i] = gate_up[i] / (1.0F + fast_exp(-gate_up[i])) * up[i];
  }
}

ANNULUS_CLONES
void swiglu_backward(const float* dout, const float* gate_up, int64_t rows, int64_t ffn, float* dgate_up) {
  for (int64_t r = 0; r < rows; ++r, gate_up += 2 * ffn, dgate_up += 2 * ffn, dout += ffn) {
    const float* up = gate_up + ffn;
    float* dup = dgate_up + ffn;
#pragma omp simd
    for (int64_t i = 0; i < ffn; ++i) {
      const float g = gate_up[i];
      const float sigmoid = 1.0F / (1.0F + fast_exp(-g));
      dup[i] = dout[i] * g * sigmoid;
      dgate_up[i] = dout[i] * up[i] * sigmoid * (1.0F + g * (1.0F - sigmoid));
    }
  }
}

ANNULUS_CLONES
double cross_entropy(const float* logits, const int64_t* targets, int64_t rows, int64_t vocab, float scale,
                     float* dlogits) {
  double loss = 0;
  for (int64_t r = 0; r < rows; ++r, logits += vocab) {
    if (targets[r] < 0) {
      if (dlogits != nullptr) dlogits = std::fill_n(dlogits, vocab, 0.0F);
      continue;
    }
    float top = logits[0];
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < vocab; ++i) top = logits[i] > top ? logits[i] : top;
    const float target = logits[targets[r]];
    float sum = 0;
    if (dlogits != nullptr) {
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < vocab; ++i) {
        const float e = fast_exp(logits[i] - top);
        dlogits[i] = e;
        sum += e;
      }
      const float factor = scale / sum;
#pragma omp simd
      for (int64_t i = 0; i < vocab; ++i) dlogits[i] *= factor;
      dlogits[targets[r]] -= scale;
      dlogits += vocab;
    } else {
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < vocab; ++i) sum += fast_exp(logits[i] - top);
    }
    loss += std::log(static_cast<double>(sum)) + top - target;
  }
  return loss;
}

}  // namespace annulus::fused
