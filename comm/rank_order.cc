// See rank_order.h.
#include "comm/rank_order.h"

#include <c10/util/BFloat16.h>

#include <algorithm>
#include <array>

namespace annulus {
namespace comm_internal {
namespace {

// Block by block, so that sums stay in the innermost cache and need no memory of their own.
template <typename T, typename Sum, typename Combine>
void reduce(T* out, const std::vector<const void*>& from, int64_t count, Combine combine) {
  constexpr int64_t kBlock = 1024;
  std::array<Sum, kBlock> sums;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = std::min(kBlock, count - begin);
    const T* first = static_cast<const T*>(from.front()) + begin;
    for (int64_t i = 0; i < n; ++i) sums[static_cast<size_t>(i)] = static_cast<Sum>(first[i]);
    for (size_t r = 1; r < from.size(); ++r) {
      const T* next = static_cast<const T*>(from[r]) + begin;
      for (int64_t i = 0; i < n; ++i) {
        Sum& sum = sums[static_cast<size_t>(i)];
        sum = combine(sum, static_cast<Sum>(next[i]));
      }
    }
    for (int64_t i = 0; i < n; ++i) out[begin + i] = static_cast<T>(sums[static_cast<size_t>(i)]);
  }
}

template <typename T, typename Sum = T>
void reduce(void* out, const std::vector<const void*>& from, int64_t count, ReduceOp op) {
  T* to = static_cast<T*>(out);
  if (op == ReduceOp::kSum) {
    reduce<T, Sum>(to, from, count, [](Sum a, Sum b) { return a + b; });
  } else if (op == ReduceOp::kMax) {
    reduce<T, Sum>(to, from, count, [](Sum a, Sum b) { return std::max(a, b); });
  } else {
    reduce<T, Sum>(to, from, count, [](Sum a, Sum b) { return std::min(a, b); });
  }
}

}  // namespace

void reduce_in_rank_order(c10::ScalarType dtype, ReduceOp op, void* out, const std::vector<const void*>& from,
                          int64_t count) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return reduce<float>(out, from, count, op);
    case c10::ScalarType::Double:
      return reduce<double>(out, from, count, op);
    case c10::ScalarType::BFloat16:
      return reduce<c10::BFloat16, float>(out, from, count, op);
    default:
      return reduce<int64_t>(out, from, count, op);
  }
}

int64_t round_bytes(int ranks, int64_t piece) {
  constexpr int64_t kFromAll = int64_t{8} << 20, kLeast = int64_t{64} << 10, kAligned = 64;
  const int64_t others = std::max(1, ranks - 1);
  return std::min(piece, std::max(kLeast, kFromAll / others / kAligned * kAligned));
}

}  // namespace comm_internal

int64_t mpi_reduce_scatter_holds(int ranks, int64_t payload) {
  const int64_t piece = payload / ranks, round = comm_internal::round_bytes(ranks, piece);
  return (ranks - 1) * round * (round < piece ? comm_internal::kRoundsAtOnce : 1);
}

}  // namespace annulus
