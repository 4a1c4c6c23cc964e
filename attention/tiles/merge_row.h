// The per-thread code and the arguments of the GPU kernel for merge_parts() (merge.h), without LibTorch or CUDA.
// merge.cu compiles it for GPUs, merge_row_test.cc for the CPU, where it runs every thread of a call. Internal to
// attention/tiles.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

#include "common/simd/device_store.h"

#ifdef __CUDACC__
#define ANNULUS_HOST_DEVICE __host__ __device__
#define ANNULUS_UNROLL _Pragma("unroll")
#else
#define ANNULUS_HOST_DEVICE
#define ANNULUS_UNROLL
#endif

struct CUstream_st;
namespace at {
class Tensor;
}

namespace annulus {

struct MergePart;

enum class MergeType { kDouble, kFloat, kBFloat16, kHalf };

// Values [b, h, rows, D] and lse [b, h, rows]. Strides are in elements, and the last dimension of values is contiguous.
struct MergeRows {
  void* values = nullptr;  // null: absent
  void* lse = nullptr;     // null: values are summed without weights
  int64_t value_strides[3] = {}, lse_strides[3] = {};
};

// The numbers begin, begin + stride, ..., begin + last: Span (attention/pattern/span.h) for GPUs.
struct MergeSpan {
  int64_t begin = 0, stride = 1, last = -1;  // last < 0: none

  // Returns the index of x, or -1 if x is not a member.
  ANNULUS_HOST_DEVICE int64_t find(int64_t x) const {
    const int64_t apart = x - begin;
    if (apart < 0 || apart > last) return -1;
    if (stride == 1) return apart;
    // 32-bit division takes a GPU a fraction of the time of 64-bit division.
    const bool small = last <= static_cast<int64_t>(UINT32_MAX);
    const int64_t i = small ? static_cast<uint32_t>(apart) / static_cast<uint32_t>(stride) : apart / stride;
    return i * stride == apart ? i : -1;
  }
};

struct MergeSource : MergeRows {
  MergeSpan members[3];  // the part's batch rows, heads and rows, in the whole
};

struct MergeArguments {
  static constexpr int kMost = 8;
  MergeRows to, before;
  MergeSource parts[kMost];
  int count = 0;                   // the number of parts
  const int64_t* index = nullptr;  // [rows] or null: the row of `to` and `before` for each row of the single part
  int64_t batch = 0, heads = 0, rows = 0, dim = 0;
  MergeType part_type = MergeType::kFloat;
  bool narrow = false;   // whether `to.values` has the parts' type, not the accumulator's
  bool aligned = false;  // whether all accesses may be vectors of four elements
};

// Makes the arguments of a call of merge_parts (merge.cc). Raises Error(kInternal) if `out` has neither the
// accumulator's dtype nor the parts'.
MergeArguments merge_arguments(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& before_out,
                               const at::Tensor& before_lse, std::span<const MergePart> parts, const at::Tensor& index);

// Launches the kernel on `stream` and returns a cudaError_t (merge.cu).
int launch_merge(const MergeArguments& arguments, CUstream_st* stream);

// A block has kMergeWarps warps of kMergeLanes threads. A warp computes the rows of one head one by one. Adjacent
// blocks compute adjacent heads, which are adjacent in memory.
inline constexpr int kMergeLanes = 32;
inline constexpr int kMergeWarps = 4;

// The grid's dimensions x, y and z, in blocks.
struct MergeGrid {
  int64_t heads = 0, rows = 0, batch = 0;

  static constexpr int64_t kMost = 65535;  // the limit of the second and third dimension
  bool empty() const { return heads == 0 || rows == 0 || batch == 0; }
  bool fits() const { return heads <= INT32_MAX && batch <= kMost; }
};

inline MergeGrid merge_grid(const MergeArguments& a) {
  if (a.dim == 0) return {};
  return {a.heads, std::min((a.rows + kMergeWarps - 1) / kMergeWarps, MergeGrid::kMost), a.batch};
}

// The position of a thread in the grid.
struct MergeThread {
  int64_t head = 0, block = 0, batch = 0;  // of its block
  int64_t blocks = 1;                      // MergeGrid::rows
  int warp = 0, lane = 0;
};

// The work of one thread. A is the accumulator's type, P the parts', and O the result's; accesses are vectors of kWidth
// elements. Sums have the same fixed order as on the CPU: the parts in order, then `before`.
template <typename A, typename P, typename O, int kWidth>
class MergeWork {
 public:
  ANNULUS_HOST_DEVICE MergeWork(const MergeArguments& arguments, const MergeThread& thread)
      : a_(arguments), thread_(thread) {}

  // Runs in all threads of a warp together. Serial code must run lane 0 last, because it writes the lse that the others
  // read.
  ANNULUS_HOST_DEVICE void run() {
    for (int64_t i = thread_.block * kMergeWarps + thread_.warp; i < a_.rows; i += thread_.blocks * kMergeWarps) {
      merge_row(i);
    }
  }

 private:
  static constexpr int kBefore = MergeArguments::kMost;  // the index of `before` in weight[]

  struct alignas(sizeof(A) * kWidth) Accumulated {
    A value[kWidth];
  };
  struct alignas(sizeof(P) * kWidth) Parts {
    P value[kWidth];
  };
  struct alignas(sizeof(O) * kWidth) Results {
    O value[kWidth];
  };

  struct Place {
    int64_t batch, head, row;
  };
  ANNULUS_HOST_DEVICE static int64_t offset(const int64_t (&strides)[3], const Place& at) {
    return at.batch * strides[0] + at.head * strides[1] + at.row * strides[2];
  }
  template <typename T>
  ANNULUS_HOST_DEVICE static T* values_at(const MergeRows& r, const Place& at) {
    return static_cast<T*>(r.values) + offset(r.value_strides, at);
  }
  ANNULUS_HOST_DEVICE static A* lse_at(const MergeRows& r, const Place& at) {
    return static_cast<A*>(r.lse) + offset(r.lse_strides, at);
  }
  // Returns the position of row i of the call in a part; some component is -1 if the part lacks the row.
  ANNULUS_HOST_DEVICE Place place_in(const MergeSource& part, int64_t i) const {
    if (a_.index != nullptr) return {thread_.batch, thread_.head, i};
    return {part.members[0].find(thread_.batch), part.members[1].find(thread_.head), part.members[2].find(i)};
  }

  ANNULUS_HOST_DEVICE void merge_row(int64_t i) {
    const Place whole{thread_.batch, thread_.head, a_.index != nullptr ? a_.index[i] : i};
    const bool sums = a_.to.lse == nullptr;
    const A nothing = -static_cast<A>(INFINITY);
    A weight[MergeArguments::kMost + 1];  // at first lse
    const P* from[MergeArguments::kMost] = {};
    A most = nothing;
    ANNULUS_UNROLL
    for (int p = 0; p < MergeArguments::kMost; ++p) {
      weight[p] = nothing;
      if (p >= a_.count) continue;
      const Place own = place_in(a_.parts[p], i);
      if (own.batch < 0 || own.head < 0 || own.row < 0) continue;
      from[p] = values_at<const P>(a_.parts[p], own);
      weight[p] = sums ? A(0) : *lse_at(a_.parts[p], own);
      if (weight[p] > most || weight[p] != weight[p]) most = weight[p];
    }
    const bool nothing_new = most == nothing;
    if (nothing_new && a_.before.values == a_.to.values) return;  // merging in place: the row stays as it is
    weight[kBefore] = a_.before.values == nullptr ? nothing : sums ? A(0) : *lse_at(a_.before, whole);
    if (weight[kBefore] > most || weight[kBefore] != weight[kBefore]) most = weight[kBefore];
    A sum = 0;  // 0 only if no part has a key
    ANNULUS_UNROLL
    for (int p = 0; p <= kBefore; ++p) {
      // Values with lse -inf (no key) may be uninitialized and are not read.
      if (weight[p] == nothing) {
        weight[p] = 0;
        continue;
      }
      using std::exp;
      weight[p] = sums ? A(1) : exp(weight[p] - most);
      sum += weight[p];
    }
    if (!sums && sum != 0) {
      ANNULUS_UNROLL
      for (int p = 0; p <= kBefore; ++p) {
        if (weight[p] != 0) weight[p] /= sum;  // 0 stays 0 if the sum is NaN
      }
    }
    O* const to = values_at<O>(a_.to, whole);
    for (int64_t d = int64_t{thread_.lane} * kWidth; d < a_.dim; d += int64_t{kMergeLanes} * kWidth) {
      A result[kWidth] = {};
      ANNULUS_UNROLL
      for (int p = 0; p < MergeArguments::kMost; ++p) {
        if (weight[p] != 0) {
          const auto part = *reinterpret_cast<const Parts*>(from[p] + d);
          ANNULUS_UNROLL
          for (int e = 0; e < kWidth; ++e) result[e] += weight[p] * static_cast<A>(part.value[e]);
        }
      }
      if (weight[kBefore] != 0) {
        const auto before = *reinterpret_cast<const Accumulated*>(values_at<const A>(a_.before, whole) + d);
        ANNULUS_UNROLL
        for (int e = 0; e < kWidth; ++e) result[e] += weight[kBefore] * before.value[e];
      }
      Results packed;
      ANNULUS_UNROLL
      for (int e = 0; e < kWidth; ++e) packed.value[e] = static_cast<O>(result[e]);
      store_whole(reinterpret_cast<Results*>(to + d), packed);
    }
#ifdef __CUDA_ARCH__
    __syncwarp();  // all lanes have read before.lse
#endif
    using std::log;
    if (!sums && thread_.lane == 0) *lse_at(a_.to, whole) = sum == 0 ? nothing : most + log(sum);
  }

  const MergeArguments& a_;
  const MergeThread thread_;
};

// Calls visit.template run<A, P, O, kWidth>() for the types of a call and returns its result.
template <typename BFloat16, typename Half, typename Visit>
auto with_merge_types(const MergeArguments& a, const Visit& visit) {
  switch (a.part_type) {
    case MergeType::kDouble:
      return a.aligned ? visit.template run<double, double, double, 4>()
                       : visit.template run<double, double, double, 1>();
    case MergeType::kBFloat16:
      if (a.narrow) {
        return a.aligned ? visit.template run<float, BFloat16, BFloat16, 4>()
                         : visit.template run<float, BFloat16, BFloat16, 1>();
      }
      return a.aligned ? visit.template run<float, BFloat16, float, 4>()
                       : visit.template run<float, BFloat16, float, 1>();
    case MergeType::kHalf:
      if (a.narrow) {
        return a.aligned ? visit.template run<float, Half, Half, 4>() : visit.template run<float, Half, Half, 1>();
      }
      return a.aligned ? visit.template run<float, Half, float, 4>() : visit.template run<float, Half, float, 1>();
    default:
      return a.aligned ? visit.template run<float, float, float, 4>() : visit.template run<float, float, float, 1>();
  }
}

}  // namespace annulus

#undef ANNULUS_HOST_DEVICE
#undef ANNULUS_UNROLL
