// RMSNorm after a residual addition as kernels for GPUs, forward and backward: one pass that reads each input and
// writes each output once. add_rms_norm (runtime/model/fused_loops.h) has the formulas. Launched by norm.cu, and
// run on a CPU by tests (elements.h); runtime/model/gpu_ops.cc fills the arguments.
//
// A *group* of threads computes a row. A kernel is a struct with its arguments, kWarps (of a group), kWarpsAtOnce (that
// run on a multiprocessor; cuda_group.h) and an operator() that every thread of every group calls with its group:
//   kThreads, thread()     the number of threads of a group, and which of them it is
//   worker(), workers()    which group it is, and how many there are
//   sync()                 barrier of the group, with memory visibility
//   sum(x), most(x)        the sum or maximum over all threads, on every thread, in a fixed order; it waits sum<n>(x)
//   likewise over n adjacent threads of a warp, or over all
//   sum_across<n>(x)       in a group of one warp, the sum over every n-th thread, on every thread; it waits
//   sum_of_warps(x)        on the first warp, the sum over the warps, lane by lane; it waits
// All threads of a group must make the same calls that wait.
#pragma once

#include <cmath>
#include <cstdint>

#include "runtime/model/gpu/elements.h"

namespace annulus::gpu {

inline constexpr int kWarp = 32;

// The layout of rows: row r begins at element (r / inner) * stride + (r % inner) * dim, and its statistic is element (r
// / inner) * statistics_stride + r % inner.
struct NormRows {
  int64_t rows = 0;
  int dim = 0;
  int64_t inner = 1, stride = 0, statistics_stride = 1;
};

struct NormArguments {
  Element element = Element::kFloat;
  bool aligned = false;  // whether rows are aligned to kVectorBytes, with lengths that are multiples of it
  NormRows at;
  const void *x = nullptr, *delta = nullptr;  // delta may be null
  const void* weight = nullptr;               // [dim]
  float offset = 0;                           // added to the weight
  float eps = 0;
  void* sum = nullptr;  // x + delta; null if delta is
  void* y = nullptr;
  float* inv_rms = nullptr;
};

// Rows are computed in batches of norm_rows(). Group g of `workers` computes batches g, g + workers, ... and writes
// their part of the weight's gradient to row g of `partial`, fp32 [workers, dim].
struct NormGradientArguments {
  Element element = Element::kFloat;
  bool aligned = false;
  NormRows at;
  const void *dy = nullptr, *dsum = nullptr;  // dsum may be null
  const void *sum = nullptr, *weight = nullptr;
  float offset = 0;  // added to the weight
  const float* inv_rms = nullptr;
  void* dx = nullptr;
  float* partial = nullptr;
  int64_t workers = 0;
};

// Sums over rows: fp32 [rows, columns] -> [columns].
struct ColumnArguments {
  const float* values = nullptr;
  int64_t rows = 0;
  int columns = 0;
  float* sums = nullptr;
};

// The number of packs of a row that a thread keeps in registers. If a row is longer than what its group keeps, the rest
// is read a second time.
inline constexpr int kHeld = 2;

// Returns the number of warps per group.
inline constexpr int norm_warps(int64_t dim, Element element, bool aligned) {
  const int64_t of_a_warp = kWarp * kHeld * (aligned ? kVectorBytes / bytes_of(element) : 1);
  return !aligned ? 4 : dim <= of_a_warp ? 1 : dim <= 4 * of_a_warp ? 4 : dim <= 8 * of_a_warp ? 8 : 16;
}

// Returns the number of rows that a group computes at once. A row that fills at most a quarter of a warp's registers
// for packs, such as a head of 128 16-bit elements, would leave threads idle.
inline constexpr int norm_rows(int64_t dim, Element element, bool aligned) {
  return aligned && dim * bytes_of(element) * 4 <= kWarp * kHeld * kVectorBytes ? 4 : 1;
}

// Returns the number of groups for one pass over all rows.
inline constexpr int64_t norm_groups(int64_t rows, int64_t dim, Element element, bool aligned) {
  const int at_once = norm_rows(dim, element, aligned);
  return (rows + at_once - 1) / at_once;
}

// Returns the number of groups of the backward, 16 warps for each of the 132 multiprocessors of an H100 or H200. It
// determines the order of sums, so it must not depend on the device.
inline constexpr int64_t norm_workers(int64_t rows, int64_t dim, Element element, bool aligned) {
  const int64_t most = 16 * 132 / norm_warps(dim, element, aligned), groups = norm_groups(rows, dim, element, aligned);
  return groups < most ? groups : most;
}

// Return the offsets of a row's first element and of its statistic.
ANNULUS_DEVICE int64_t begin_of(const NormRows& at, int64_t row) {
  return at.inner == 1 ? row * at.stride : row / at.inner * at.stride + row % at.inner * at.dim;
}
ANNULUS_DEVICE int64_t statistic_of(const NormRows& at, int64_t row) {
  return at.inner == 1 ? row * at.statistics_stride : row / at.inner * at.statistics_stride + row % at.inner;
}

template <typename T, int kWidth, int kWarps_, int kRows = 1>
struct Norm {
  static constexpr int kWarps = kWarps_;
  static constexpr int kWarpsAtOnce = 32;
  using Packed = Pack<T, kWidth>;
  using Held = Folded<T, kWidth>;

  NormArguments a;

  template <typename Group>
  ANNULUS_DEVICE void operator()(Group& group) const {
    constexpr int kThreads = Group::kThreads / kRows;  // of a row
    constexpr int kStep = kThreads * kWidth;           // columns that they load at once
    const int first = group.thread() % kThreads * kWidth;
    const T* const weight = static_cast<const T*>(a.weight);
    for (int64_t rows = group.worker() * kRows; rows < a.at.rows; rows += group.workers() * kRows) {
      const int64_t row = rows + group.thread() / kThreads;
      const int dim = kRows == 1 || row < a.at.rows ? a.at.dim : 0;  // no columns for a thread without a row
      const int64_t begin = begin_of(a.at, row);
      const T* const x = static_cast<const T*>(a.x) + begin;
      const T* const delta = a.delta != nullptr ? static_cast<const T*>(a.delta) + begin : nullptr;
      T* const sum = a.sum != nullptr ? static_cast<T*>(a.sum) + begin : nullptr;
      T* const y = static_cast<T*>(a.y) + begin;

      // The statistics are those of the rounded sum, which the backward reads.
      float squares = 0;
      const auto add = [&](int c, Packed s, const Packed& d) {
        if (delta != nullptr) {
          ANNULUS_UNROLL
          for (int e = 0; e < kWidth; ++e) {
            s.value[e] = static_cast<T>(static_cast<float>(s.value[e]) + static_cast<float>(d.value[e]));
          }
          store(sum + c, s);
        }
        ANNULUS_UNROLL
        for (int e = 0; e < kWidth; ++e) {
          const float v = static_cast<float>(s.value[e]);
          squares += v * v;
        }
        return s;
      };
      // Issue the loads of all columns before the first is needed.
      Held held[kHeld], added[kHeld];
      ANNULUS_UNROLL
      for (int i = 0; i < kHeld; ++i) {
        const int c = first + i * kStep;
        if (c < dim) held[i].load_from(x + c);
        if (c < dim && delta != nullptr) added[i].load_from(delta + c);
      }
      ANNULUS_UNROLL
      for (int i = 0; i < kHeld; ++i) {
        const int c = first + i * kStep;
        if (c < dim) held[i] = Held(add(c, held[i].unfold(), added[i].unfold()));
      }
      ANNULUS_UNROLL_BY(1)
      for (int c = first + kHeld * kStep; c < dim; c += kStep) {
        add(c, load<kWidth>(x + c), delta != nullptr ? load<kWidth>(delta + c) : Packed{});
      }

      const float inverse = 1.0F / sqrtf(group.template sum<kThreads>(squares) / static_cast<float>(a.at.dim) + a.eps);
      const auto write = [&](int c, const Packed& s) {
        const Packed w = load<kWidth>(weight + c);
        Packed result;
        ANNULUS_UNROLL
        for (int e = 0; e < kWidth; ++e) {
          const float factor = a.offset + static_cast<float>(w.value[e]);
          result.value[e] = static_cast<T>(static_cast<float>(s.value[e]) * inverse * factor);
        }
        store(y + c, result);
      };
      ANNULUS_UNROLL
      for (int i = 0; i < kHeld; ++i) {
        if (first + i * kStep < dim) write(first + i * kStep, held[i].unfold());
      }
      // A thread rereads only what it has read or written itself.
      ANNULUS_UNROLL_BY(1)
      for (int c = first + kHeld * kStep; c < dim; c += kStep) write(c, load<kWidth>((sum != nullptr ? sum : x) + c));
      if (first == 0 && dim != 0) a.inv_rms[statistic_of(a.at, row)] = inverse;
    }
  }
};

template <typename T, int kWidth, int kWarps_, int kRows = 1>
struct NormGradient {
  static constexpr int kWarps = kWarps_;
  static constexpr int kWarpsAtOnce = 16;  // norm_workers
  using Packed = Pack<T, kWidth>;
  using Held = Folded<T, kWidth>;

  NormGradientArguments a;

  template <typename Group>
  ANNULUS_DEVICE void operator()(Group& group) const {
    constexpr int kThreads = Group::kThreads / kRows;
    constexpr int kStep = kThreads * kWidth;
    const int first = group.thread() % kThreads * kWidth;
    const T* const weight = static_cast<const T*>(a.weight);
    float* const partial = a.partial + group.worker() * a.at.dim;
    float dweight[kHeld][kWidth] = {};
    Held held_weight[kHeld];
    ANNULUS_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      const int c = first + i * kStep;
      if (c < a.at.dim) held_weight[i].load_from(weight + c);
    }
    for (int64_t rows = group.worker() * kRows; rows < a.at.rows; rows += group.workers() * kRows) {
      const int64_t row = rows + group.thread() / kThreads;
      const int dim = kRows == 1 || row < a.at.rows ? a.at.dim : 0;
      const int64_t begin = begin_of(a.at, row);
      const T* const dy = static_cast<const T*>(a.dy) + begin;
      const T* const dsum = a.dsum != nullptr ? static_cast<const T*>(a.dsum) + begin : nullptr;
      const T* const sum = static_cast<const T*>(a.sum) + begin;
      T* const dx = static_cast<T*>(a.dx) + begin;
      const float inverse = dim != 0 ? a.inv_rms[statistic_of(a.at, row)] : 0.0F;

      float dot = 0;  // of the normed row's gradient with the sum
      const auto multiply = [&](const Packed& g, const Packed& s, const Packed& w) {
        ANNULUS_UNROLL
        for (int e = 0; e < kWidth; ++e) {
          const float factor = a.offset + static_cast<float>(w.value[e]);
          dot += static_cast<float>(g.value[e]) * factor * static_cast<float>(s.value[e]);
        }
      };
      // Issue the loads of all columns before the first is needed.
      Held held_dy[kHeld], held_sum[kHeld], held_dsum[kHeld];
      ANNULUS_UNROLL
      for (int i = 0; i < kHeld; ++i) {
        const int c = first + i * kStep;
        if (c < dim) held_dy[i].load_from(dy + c), held_sum[i].load_from(sum + c);
        if (c < dim && dsum != nullptr) held_dsum[i].load_from(dsum + c);
      }
      ANNULUS_UNROLL
      for (int i = 0; i < kHeld; ++i) {
        if (first + i * kStep < dim) multiply(held_dy[i].unfold(), held_sum[i].unfold(), held_weight[i].unfold());
      }
      ANNULUS_UNROLL_BY(1)
      for (int c = first + kHeld * kStep; c < dim; c += kStep) {
        multiply(load<kWidth>(dy + c), load<kWidth>(sum + c), load<kWidth>(weight + c));
      }

      const float back = group.template sum<kThreads>(dot) * inverse * inverse * inverse / static_cast<float>(a.at.dim);
      const auto write = [&](int c, const Packed& g, const Packed& s, const Packed& w, const Packed& given,
                             float* of_weight) {
        Packed result;
        ANNULUS_UNROLL
        for (int e = 0; e < kWidth; ++e) {
          const float through = static_cast<float>(g.value[e]) * inverse, v = static_cast<float>(s.value[e]);
          const float factor = a.offset + static_cast<float>(w.value[e]);
          of_weight[e] += through * v;
          result.value[e] = static_cast<T>(static_cast<float>(given.value[e]) + (through * factor - v * back));
        }
        store(dx + c, result);
      };
      ANNULUS_UNROLL
      for (int i = 0; i < kHeld; ++i) {
        const int c = first + i * kStep;
        if (c < dim) {
          write(c, held_dy[i].unfold(), held_sum[i].unfold(), held_weight[i].unfold(), held_dsum[i].unfold(),
                dweight[i]);
        }
      }
      // These columns accumulate in memory, which only this thread accesses.
      ANNULUS_UNROLL_BY(1)
      for (int c = first + kHeld * kStep; c < dim; c += kStep) {
        if (rows == group.worker() * kRows) {
          for (int e = 0; e < kWidth; ++e) partial[c + e] = 0;
        }
        write(c, load<kWidth>(dy + c), load<kWidth>(sum + c), load<kWidth>(weight + c),
              dsum != nullptr ? load<kWidth>(dsum + c) : Packed{}, partial + c);
      }
    }
    ANNULUS_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      const int c = first + i * kStep;
      ANNULUS_UNROLL
      for (int e = 0; e < kWidth; ++e) {
        float total = dweight[i][e];
        if constexpr (kRows > 1) total = group.template sum_across<kThreads>(total);
        if (c < a.at.dim && group.thread() < kThreads) partial[c + e] = total;
      }
    }
  }
};

template <int kWarps_>
struct Columns {
  static constexpr int kWarps = kWarps_;
  static constexpr int kWarpsAtOnce = 64;

  ColumnArguments a;

  // A group sums kWarp columns, each of its warps a part of the rows.
  template <typename Group>
  ANNULUS_DEVICE void operator()(Group& group) const {
    const int64_t column = group.worker() * kWarp + group.thread() % kWarp;
    float sum = 0;
    if (column < a.columns) {
      for (int64_t row = group.thread() / kWarp; row < a.rows; row += kWarps) sum += a.values[row * a.columns + column];
    }
    const float total = group.sum_of_warps(sum);
    if (group.thread() < kWarp && column < a.columns) a.sums[column] = total;
  }
};

// Choose a kernel for the arguments and call start(kernel, number of groups).
template <typename Start>
void choose(const NormArguments& a, const Start& start) {
  by_element(a.element, [&]<typename T>(T) {
    const int warps = norm_warps(a.at.dim, a.element, a.aligned);
    const int64_t groups = norm_groups(a.at.rows, a.at.dim, a.element, a.aligned);
    if (!a.aligned) return start(Norm<T, 1, 4>{a}, groups);
    if (norm_rows(a.at.dim, a.element, a.aligned) == 4) return start(Norm<T, kVector<T>, 1, 4>{a}, groups);
    if (warps == 1) return start(Norm<T, kVector<T>, 1>{a}, groups);
    if (warps == 4) return start(Norm<T, kVector<T>, 4>{a}, groups);
    if (warps == 8) return start(Norm<T, kVector<T>, 8>{a}, groups);
    return start(Norm<T, kVector<T>, 16>{a}, groups);
  });
}

template <typename Start>
void choose(const NormGradientArguments& a, const Start& start) {
  by_element(a.element, [&]<typename T>(T) {
    const int warps = norm_warps(a.at.dim, a.element, a.aligned);
    if (!a.aligned) return start(NormGradient<T, 1, 4>{a}, a.workers);
    if (norm_rows(a.at.dim, a.element, a.aligned) == 4) return start(NormGradient<T, kVector<T>, 1, 4>{a}, a.workers);
    if (warps == 1) return start(NormGradient<T, kVector<T>, 1>{a}, a.workers);
    if (warps == 4) return start(NormGradient<T, kVector<T>, 4>{a}, a.workers);
    if (warps == 8) return start(NormGradient<T, kVector<T>, 8>{a}, a.workers);
    return start(NormGradient<T, kVector<T>, 16>{a}, a.workers);
  });
}

template <typename Start>
void choose(const ColumnArguments& a, const Start& start) {
  start(Columns<16>{a}, (static_cast<int64_t>(a.columns) + kWarp - 1) / kWarp);
}

}  // namespace annulus::gpu
