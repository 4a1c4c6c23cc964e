// See rank_order.h.
#include "comm/rank_order.h"

#include <c10/util/BFloat16.h>

#include <algorithm>
#include <array>

namespace annulus {
namespace comm_internal {
namespace {

// Works block by block, so that the sums stay in the L1 cache and need no memory of the size of a tensor.
template <typename Sum, typename Out, typename In, typename Combine>
void reduce(Out* out, const std::vector<const void*>& from, int64_t count, const RankGroups& groups, Combine combine) {
  constexpr int64_t kBlock = 1024;
  std::array<Sum, kBlock> sums, of_group;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = std::min(kBlock, count - begin);
    for (int group = 0; group < groups.count(); ++group) {
      Sum* const to = group == 0 ? sums.data() : of_group.data();
      for (int r = groups.first(group); r < groups.first(group + 1); ++r) {
        const In* next = static_cast<const In*>(from[static_cast<size_t>(r)]) + begin;
        if (r == groups.first(group)) {
          for (int64_t i = 0; i < n; ++i) to[i] = static_cast<Sum>(next[i]);
        } else {
          for (int64_t i = 0; i < n; ++i) to[i] = combine(to[i], static_cast<Sum>(next[i]));
        }
      }
      if (group == 0) continue;
      for (int64_t i = 0; i < n; ++i) sums[static_cast<size_t>(i)] = combine(sums[static_cast<size_t>(i)], to[i]);
    }
    for (int64_t i = 0; i < n; ++i) out[begin + i] = static_cast<Out>(sums[static_cast<size_t>(i)]);
  }
}

template <typename Sum, typename Out, typename In>
void reduce(void* out, const std::vector<const void*>& from, int64_t count, const RankGroups& groups, ReduceOp op) {
  Out* to = static_cast<Out*>(out);
  if (op == ReduceOp::kSum) {
    reduce<Sum, Out, In>(to, from, count, groups, [](Sum a, Sum b) { return a + b; });
  } else if (op == ReduceOp::kMax) {
    reduce<Sum, Out, In>(to, from, count, groups, [](Sum a, Sum b) { return std::max(a, b); });
  } else {
    reduce<Sum, Out, In>(to, from, count, groups, [](Sum a, Sum b) { return std::min(a, b); });
  }
}

RankGroups one_group(const std::vector<const void*>& from) { return RankGroups({static_cast<int>(from.size())}); }

}  // namespace

void reduce_in_rank_order(c10::ScalarType dtype, ReduceOp op, void* out, const std::vector<const void*>& from,
                          int64_t count, const RankGroups& groups) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return reduce<float, float, float>(out, from, count, groups, op);
    case c10::ScalarType::Double:
      return reduce<double, double, double>(out, from, count, groups, op);
    case c10::ScalarType::BFloat16:
      return reduce<float, c10::BFloat16, c10::BFloat16>(out, from, count, groups, op);
    default:
      return reduce<int64_t, int64_t, int64_t>(out, from, count, groups, op);
  }
}

void reduce_to_sums(SumTypes types, ReduceOp op, void* sums, const std::vector<const void*>& values, int64_t count) {
  const RankGroups all = one_group(values);
  if (types.sums == types.values) return reduce_in_rank_order(types.values, op, sums, values, count, all);
  reduce<float, float, c10::BFloat16>(sums, values, count, all, op);
}

void reduce_sums(SumTypes types, ReduceOp op, void* values, const std::vector<const void*>& sums, int64_t count) {
  const RankGroups all = one_group(sums);
  if (types.sums == types.values) return reduce_in_rank_order(types.values, op, values, sums, count, all);
  reduce<float, c10::BFloat16, float>(values, sums, count, all, op);
}

int64_t held_parts(const RankGroups& groups, int rank) {
  const int64_t others = groups.size(groups.of(rank)) - 1;
  if (groups.count() == 1) return others;
  // For each part that this rank carries, the values of the other ranks of its host, and the sum; for its own part also
  // the sums of the other hosts.
  const auto carried = static_cast<int64_t>(groups.carried_by(rank).size());
  return carried * others + carried + groups.count() - 1;
}

namespace {

// The first rank of a group carries at least as many parts as any other rank of the group.
int64_t most_held_parts(const RankGroups& groups) {
  int64_t most = 1;
  for (int group = 0; group < groups.count(); ++group) most = std::max(most, held_parts(groups, groups.first(group)));
  return most;
}

}  // namespace

int64_t round_bytes(const RankGroups& groups, int64_t piece) {
  constexpr int64_t kOfAll = int64_t{8} << 20, kLeast = int64_t{64} << 10, kAligned = 64;
  return std::min(piece, std::max(kLeast, kOfAll / most_held_parts(groups) / kAligned * kAligned));
}

}  // namespace comm_internal

int64_t messages_hold(const RankGroups& groups, int rank, int64_t payload) {
  const int64_t piece = payload / groups.ranks(), round = comm_internal::round_bytes(groups, piece);
  return comm_internal::held_parts(groups, rank) * round * (round < piece ? comm_internal::kRoundsAtOnce : 1);
}

}  // namespace annulus
