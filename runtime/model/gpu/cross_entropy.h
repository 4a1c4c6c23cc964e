// Cross entropy and its gradient as one kernel on a GPU, which reads the logits of a row twice and overwrites them with
// their gradient. Launched by cross_entropy.cu, and run on a CPU by tests (elements.h); runtime/model/gpu_ops.cc fills
// the arguments.
#pragma once

#include <cmath>
#include <cstdint>

#include "runtime/model/gpu/elements.h"

namespace annulus::gpu {

struct CrossEntropyArguments {
  bool aligned = false;              // whether every row of logits is aligned to kVectorBytes
  float* logits = nullptr;           // [rows, vocab]
  const int64_t* targets = nullptr;  // [rows], below vocab; negative: no loss, no gradient
  const float* weights = nullptr;    // [rows]; null: all are 1
  float* losses = nullptr;           // [rows]: weight * -log softmax(logits)[target]
  // Overwrites the logits with (softmax - onehot) * weight * scale. A 16-bit gradient fills the first half of each
  // row's memory.
  bool with_gradient = false;
  Element gradient = Element::kFloat;
  float scale = 1;
  int64_t rows = 0;
  int vocab = 0;
};

// Returns the number of warps per row. With 32, an H100 computes 264 rows at a time. Its L2 cache of 50 MB keeps those
// of a vocabulary of 32,768 (35 MB) until the second read, but not those of 128,256 (135 MB; 68 MB with one row on each
// of its 132 multiprocessors), which are read from memory twice.
inline constexpr int cross_entropy_warps(int64_t vocab) { return vocab < 4096 ? 8 : 32; }

template <typename T, int kWidth, int kWarps_>
struct CrossEntropy {
  static constexpr int kWarps = kWarps_;
  static constexpr int kWarpsAtOnce = 64;  // two rows of 32 warps: one loads while the other reduces
  // The unrolling of the first loop, which takes registers. With 16-byte loads 64 warps have 32 KB in flight without
  // it.
  static constexpr int kCopies = kWidth == 1 ? 4 : 1;
  using Logits = Pack<float, kWidth>;

  CrossEntropyArguments a;

  // A group computes a row (norm.h).
  template <typename Group>
  ANNULUS_DEVICE void operator()(Group& group) const {
    constexpr int kStep = Group::kThreads * kWidth;
    const int first = group.thread() * kWidth;
    for (int64_t row = group.worker(); row < a.rows; row += group.workers()) {
      float* const logits = a.logits + row * a.vocab;
      T* const gradient = reinterpret_cast<T*>(logits);
      const int target = static_cast<int>(a.targets[row]);
      if (target < 0) {
        if (group.thread() == 0) a.losses[row] = 0;
        for (int c = first; a.with_gradient && c < a.vocab; c += kStep) store(gradient + c, Pack<T, kWidth>{});
        continue;
      }

      const float weight = a.weights == nullptr ? 1.0F : a.weights[row], scale = a.scale * weight;

      // Loaded early to overlap with the pass. The reductions below synchronize, so no thread has written a gradient
      // yet.
      const float of_target = group.thread() == 0 ? logits[target] : 0.0F;

      // Online softmax (arXiv 1805.02867): the running maximum, and the sum of exponentials relative to it.
      float most = -INFINITY, sum = 0;
      ANNULUS_UNROLL_BY(kCopies)
      for (int c = first; c < a.vocab; c += kStep) {
        const Logits x = load<kWidth>(logits + c);
        float higher = most;
        ANNULUS_UNROLL
        for (int e = 0; e < kWidth; ++e) higher = fmaxf(higher, x.value[e]);  // ignores NaN, which the sum propagates
        if (higher > most) {
          sum *= expf(most - higher);
          most = higher;
        }
        ANNULUS_UNROLL
        for (int e = 0; e < kWidth; ++e) sum += expf(x.value[e] - (most == -INFINITY ? 0.0F : most));
      }
      const float top = group.most(most);
      const float total = group.sum(sum * expf(most - top));
      if (group.thread() == 0) a.losses[row] = weight * (logf(total) + (top - of_target));
      if (!a.with_gradient) continue;

      const float factor = scale / total;
      for (int begin = 0; begin < a.vocab; begin += kStep) {
        const int c = begin + first;
        Logits x;
        if (c < a.vocab) x = load<kWidth>(logits + c);
        // A 16-bit gradient of these columns overwrites logits of these or earlier columns, which all threads must have
        // read.
        if constexpr (sizeof(T) < sizeof(float)) group.sync();
        if (c >= a.vocab) continue;
        Pack<T, kWidth> g;
        ANNULUS_UNROLL
        for (int e = 0; e < kWidth; ++e) {
          g.value[e] = static_cast<T>(expf(x.value[e] - top) * factor - (c + e == target ? scale : 0.0F));
        }
        store(gradient + c, g);
      }
    }
  }
};

// As choose() of norm.h.
template <typename Start>
void choose(const CrossEntropyArguments& a, const Start& start) {
  by_element(a.gradient, [&]<typename T>(T) {
    const bool few = cross_entropy_warps(a.vocab) == 8;
    if (a.aligned && few) return start(CrossEntropy<T, kVector<float>, 8>{a}, a.rows);
    if (a.aligned) return start(CrossEntropy<T, kVector<float>, 32>{a}, a.rows);
    if (few) return start(CrossEntropy<T, 1, 8>{a}, a.rows);
    return start(CrossEntropy<T, 1, 32>{a}, a.rows);
  });
}

}  // namespace annulus::gpu
