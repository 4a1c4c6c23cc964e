// SwiGLU and GeGLU (arXiv 2002.05202) and their gradients as one pass each on a GPU; swiglu and geglu
// (runtime/model/fused_loops.h) have the shapes. Launched by elementwise.cu, and run on a CPU by tests (elements.h);
// runtime/model/gpu_ops.cc fills the arguments.
#pragma once

#include <cstdint>

#include "runtime/model/gpu/elements.h"

namespace annulus::gpu {

struct SwiGluArguments {
  Element element = Element::kFloat;
  bool aligned = false;           // whether gate, up and result are aligned to kVectorBytes in every row
  bool gelu = false;              // GeGLU, by the tanh approximation of GELU
  const void* gate_up = nullptr;  // [rows, 2 ffn]
  const void* dout = nullptr;     // [rows, ffn]; null: forward
  void* result = nullptr;         // forward: [rows, ffn]; backward: like gate_up
  int64_t rows = 0;
  int ffn = 0;
};

template <typename T, int kWidth, bool kBackward, bool kGelu>
struct SwiGlu {
  static constexpr int kWarps = 8;
  static constexpr int kWarpsAtOnce = kBackward ? 32 : 48;
  using Packed = Pack<T, kWidth>;

  SwiGluArguments a;

  // A group computes a row (norm.h).
  template <typename Group>
  ANNULUS_DEVICE void operator()(Group& group) const {
    const int64_t ffn = a.ffn;
    for (int64_t row = group.worker(); row < a.rows; row += group.workers()) {
      const T* const gate = static_cast<const T*>(a.gate_up) + row * 2 * ffn;
      for (int c = group.thread() * kWidth; c < a.ffn; c += Group::kThreads * kWidth) {
        Packed g = load<kWidth>(gate + c), u = load<kWidth>(gate + ffn + c);
        if constexpr (kBackward) {
          const Packed o = load<kWidth>(static_cast<const T*>(a.dout) + row * ffn + c);
          ANNULUS_UNROLL
          for (int e = 0; e < kWidth; ++e) {
            const float v = static_cast<float>(g.value[e]), s = sigmoid(z(v));
            const float os = static_cast<float>(o.value[e]) * s;
            g.value[e] = static_cast<T>(os * static_cast<float>(u.value[e]) * (v * (1.0F - s) * slope(v) + 1.0F));
            u.value[e] = static_cast<T>(os * v);
          }
          T* const dgate = static_cast<T*>(a.result) + row * 2 * ffn;
          store(dgate + c, g);
          store(dgate + ffn + c, u);
        } else {
          ANNULUS_UNROLL
          for (int e = 0; e < kWidth; ++e) {
            const float v = static_cast<float>(g.value[e]);
            g.value[e] = static_cast<T>(v * sigmoid(z(v)) * static_cast<float>(u.value[e]));
          }
          store(static_cast<T*>(a.result) + row * ffn + c, g);
        }
      }
    }
  }

 private:
  // The activation is x sigmoid(z(x)), as in fused_loops.cc, and slope() the derivative of z.
  static constexpr float kLinear = 1.5957691216057308F, kCubic = kLinear * 0.044715F;
  ANNULUS_DEVICE static float z(float x) { return kGelu ? x * (kLinear + kCubic * x * x) : x; }
  ANNULUS_DEVICE static float slope(float x) { return kGelu ? kLinear + 3 * kCubic * x * x : 1.0F; }
  // If e^-x overflows, this is 1 / infinity = 0.
  ANNULUS_DEVICE static float sigmoid(float x) { return 1.0F / (1.0F + expf(-x)); }
};

// As choose() of norm.h.
template <typename Start>
void choose(const SwiGluArguments& a, const Start& start) {
  by_element(a.element, [&]<typename T>(T) {
    const auto start_with = [&]<bool kGelu>() {
      if (a.aligned && a.dout != nullptr) return start(SwiGlu<T, kVector<T>, true, kGelu>{a}, a.rows);
      if (a.aligned) return start(SwiGlu<T, kVector<T>, false, kGelu>{a}, a.rows);
      if (a.dout != nullptr) return start(SwiGlu<T, 1, true, kGelu>{a}, a.rows);
      return start(SwiGlu<T, 1, false, kGelu>{a}, a.rows);
    };
    return a.gelu ? start_with.template operator()<true>() : start_with.template operator()<false>();
  });
}

}  // namespace annulus::gpu
