// Splits the fused projection into heads and rotates queries and keys, or merges their gradients, in one pass on a GPU;
// rotary_split (runtime/model/fused_loops.h) has the shapes. Launched by elementwise.cu, and run on a CPU by
// tests (elements.h); runtime/model/gpu_ops.cc fills the arguments.
#pragma once

#include <cstdint>

#include "runtime/model/gpu/elements.h"

namespace annulus::gpu {

struct RotaryArguments {
  Element element = Element::kFloat;
  bool aligned = false;   // whether every half of a head, and of a table's row, is aligned to kVectorBytes
  bool backward = false;  // q, k and v are read, and qkv is written
  void* qkv = nullptr;    // [rows, (heads + 2 kv_heads) head_dim]
  void *q = nullptr, *k = nullptr, *v = nullptr;   // [rows, heads or kv_heads, head_dim]
  const float *cosine = nullptr, *sine = nullptr;  // [positions, head_dim / 2]; row r has position r % positions
  int64_t rows = 0, positions = 1;
  int heads = 0, kv_heads = 0, head_dim = 0;
};

template <typename T, int kWidth, bool kBackward>
struct Rotary {
  static constexpr int kWarps = 4;
  static constexpr int kWarpsAtOnce = 40;
  using Packed = Pack<T, kWidth>;

  RotaryArguments a;

  // A group computes a row (norm.h). A thread takes kWidth pairs (i, i + head_dim / 2) at a time.
  template <typename Group>
  ANNULUS_DEVICE void operator()(Group& group) const {
    const int half = a.head_dim / 2, packs = half / kWidth, heads = a.heads + 2 * a.kv_heads;
    for (int64_t row = group.worker(); row < a.rows; row += group.workers()) {
      const int64_t position = row % a.positions * half;
      for (int i = group.thread(); i < heads * packs; i += Group::kThreads) {
        const int head = i / packs, c = i % packs * kWidth;
        T* const merged = static_cast<T*>(a.qkv) + (row * heads + head) * a.head_dim + c;
        T* const split = part(row, head) + c;
        const T* const from = kBackward ? split : merged;
        T* const to = kBackward ? merged : split;
        Packed x = load<kWidth>(from), y = load<kWidth>(from + half);
        if (head < a.heads + a.kv_heads) rotate(x, y, position + c);
        store(to, x);
        store(to + half, y);
      }
    }
  }

 private:
  // Returns a head of the split tensors.
  ANNULUS_DEVICE T* part(int64_t row, int head) const {
    if (head < a.heads) return static_cast<T*>(a.q) + (row * a.heads + head) * a.head_dim;
    head -= a.heads;
    if (head < a.kv_heads) return static_cast<T*>(a.k) + (row * a.kv_heads + head) * a.head_dim;
    return static_cast<T*>(a.v) + (row * a.kv_heads + head - a.kv_heads) * a.head_dim;
  }
  ANNULUS_DEVICE void rotate(Packed& x, Packed& y, int64_t angle) const {
    // Loads 16 bytes of the tables at a time.
    constexpr int kAngles = kWidth < kVector<float> ? kWidth : kVector<float>;
    ANNULUS_UNROLL
    for (int first = 0; first < kWidth; first += kAngles) {
      const Pack<float, kAngles> cosines = load<kAngles>(a.cosine + angle + first);
      const Pack<float, kAngles> sines = load<kAngles>(a.sine + angle + first);
      ANNULUS_UNROLL
      for (int e = 0; e < kAngles; ++e) {
        const float c = cosines.value[e], s = kBackward ? -sines.value[e] : sines.value[e];
        const float u = static_cast<float>(x.value[first + e]), v = static_cast<float>(y.value[first + e]);
        x.value[first + e] = static_cast<T>(u * c - v * s);
        y.value[first + e] = static_cast<T>(v * c + u * s);
      }
    }
  }
};

// As choose() of norm.h.
template <typename Start>
void choose(const RotaryArguments& a, const Start& start) {
  by_element(a.element, [&]<typename T>(T) {
    if (a.aligned && a.backward) return start(Rotary<T, kVector<T>, true>{a}, a.rows);
    if (a.aligned) return start(Rotary<T, kVector<T>, false>{a}, a.rows);
    if (a.backward) return start(Rotary<T, 1, true>{a}, a.rows);
    return start(Rotary<T, 1, false>{a}, a.rows);
  });
}

}  // namespace annulus::gpu
