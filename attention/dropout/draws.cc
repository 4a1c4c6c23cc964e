// Philox in vectors, compiled once for each instruction set; see draws.h.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention/dropout/draws.cc"
#include "common/simd/versions.h"

#include <algorithm>
#include <type_traits>

#include "attention/dropout/draws.h"
#include "attention/dropout/philox.h"

#ifndef ANNULUS_DRAWS_GROUPS_
#define ANNULUS_DRAWS_GROUPS_
namespace annulus::draws {

struct Groups {
  // Writes, for the four words of each of the groups first, ..., first + count - 1, `kept` if the word is above `last`
  // and 0 otherwise. count is a multiple of lanes.
  void (*stay)(uint64_t key, uint64_t query, uint64_t first, int64_t count, uint32_t last, float kept, float* to);
  int64_t lanes;
};

}  // namespace annulus::draws
#endif

HWY_BEFORE_NAMESPACE();
namespace annulus {
namespace draws {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_SCALAR
void stay(uint64_t key, uint64_t query, uint64_t first, int64_t count, uint32_t last, float kept, float* to) {
  for (int64_t g = 0; g < count; ++g) {
    uint32_t four[4];
    philox(key, query, first + static_cast<uint64_t>(g), four);
    for (int w = 0; w < 4; ++w) to[4 * g + w] = four[w] > last ? kept : 0.0f;
  }
}
constexpr Groups kGroups = {stay, 1};
#else
// A lane of 64 bits computes a group. Each of its four words is the lower half of a lane in one of four vectors; the
// upper halves hold what the multiplications leave there, and nothing reads them.
using Lanes = hn::ScalableTag<uint64_t>;
using Words = hn::ScalableTag<uint32_t>;
using V = hn::Vec<Lanes>;

struct Counter {
  V words[4];
};

HWY_INLINE V product(V x, V m) { return hn::MulEven(hn::BitCast(Words(), x), hn::BitCast(Words(), m)); }

HWY_INLINE void mix(Counter& x, V m0, V m1, V k0, V k1) {
  const V first = product(x.words[0], m0), second = product(x.words[2], m1);
  x.words[0] = hn::Xor3(hn::ShiftRight<32>(second), x.words[1], k0);
  x.words[2] = hn::Xor3(hn::ShiftRight<32>(first), x.words[3], k1);
  x.words[1] = second, x.words[3] = first;
}

// `kept` where the words of a and b, which take turns, are above `most`, else 0.
HWY_INLINE V factors(V a, V b, hn::Vec<Words> most, hn::Vec<hn::ScalableTag<float> > kept) {
  const hn::ScalableTag<float> f;
  const auto words = hn::OddEven(hn::BitCast(Words(), hn::ShiftLeft<32>(b)), hn::BitCast(Words(), a));
  return hn::BitCast(Lanes(), hn::IfThenElseZero(hn::RebindMask(f, hn::Gt(words, most)), kept));
}

void stay(uint64_t key, uint64_t query, uint64_t first, int64_t count, uint32_t last, float kept, float* to) {
  constexpr int kCounters = 2;  // computed at once, because the operations of a single one wait for each other
  const Lanes d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto m0 = hn::Set(d, kPhiloxMultiplier0), m1 = hn::Set(d, kPhiloxMultiplier1);
  const auto most = hn::Set(Words(), last);
  const auto factor = hn::Set(hn::ScalableTag<float>(), kept);
  const V step = hn::Set(d, static_cast<uint64_t>(lanes));
  V group = hn::Iota(d, first);
  for (int64_t g = 0; g < count; g += kCounters * lanes) {
    Counter counters[kCounters];
#pragma GCC unroll 2
    for (int i = 0; i < kCounters; ++i) {
      counters[i] = {{group, hn::ShiftRight<32>(group), hn::Set(d, query), hn::Set(d, query >> 32)}};
      group = hn::Add(group, step);
    }
    uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < kPhiloxRounds; ++round) {
#pragma GCC unroll 2
      for (int i = 0; i < kCounters; ++i) mix(counters[i], m0, m1, hn::Set(d, k0), hn::Set(d, k1));
      k0 += kPhiloxWeyl0, k1 += kPhiloxWeyl1;
    }
#pragma GCC unroll 2
    for (int i = 0; i < kCounters; ++i) {
      const V(&w)[4] = counters[i].words;
      hn::StoreInterleaved2(factors(w[0], w[1], most, factor), factors(w[2], w[3], most, factor), d,
                            reinterpret_cast<uint64_t*>(to + 4 * (g + i * lanes)));
    }
  }
}
constexpr Groups kGroups = {stay, 2 * static_cast<int64_t>(hn::MaxLanes(Lanes()))};
#endif

}  // namespace HWY_NAMESPACE
}  // namespace draws
}  // namespace annulus
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace annulus {

template <typename T>
void draw_row(uint64_t philox_key, int64_t query, const Span& keys, uint64_t threshold, T kept, T* factors) {
  static const draws::Groups& groups = ANNULUS_VERSION(draws, kGroups);
  constexpr int64_t kMost = 64;  // the groups computed at a time; a multiple of any number of lanes
  float some[4 * kMost];
  const auto row = static_cast<uint64_t>(query);
  if (threshold == 0) {
    std::fill_n(factors, keys.count, kept);
    return;
  }
  const auto last = static_cast<uint32_t>(threshold - 1);  // the threshold itself may need 33 bits
  for (int64_t j = 0; j < keys.count;) {
    const int64_t first = keys.at(j) / 4, within = keys.at(j) % 4;
    if (keys.stride != 1) {
      uint32_t four[4];
      philox(philox_key, row, static_cast<uint64_t>(first), four);
      for (; j < keys.count && keys.at(j) / 4 == first; ++j) factors[j] = four[keys.at(j) % 4] > last ? kept : T{0};
      continue;
    }
    if constexpr (std::is_same_v<T, float>) {
      const int64_t whole = (keys.count - j) / 4 / groups.lanes * groups.lanes;
      if (within == 0 && whole > 0) {
        groups.stay(philox_key, row, static_cast<uint64_t>(first), whole, last, kept, factors + j);
        j += 4 * whole;
        continue;
      }
    }
    // All words of a run of groups, of which the first and the last may be used in part.
    const int64_t past = std::min(keys.last() / 4 + 1, first + kMost);
    const int64_t count = (past - first + groups.lanes - 1) / groups.lanes * groups.lanes;
    const int64_t used = std::min(keys.count - j, 4 * (past - first) - within);
    const float* const from = some + within;
    if constexpr (std::is_same_v<T, float>) {
      groups.stay(philox_key, row, static_cast<uint64_t>(first), count, last, kept, some);
      std::copy_n(from, used, factors + j);
    } else {
      groups.stay(philox_key, row, static_cast<uint64_t>(first), count, last, 1, some);
      std::transform(from, from + used, factors + j, [&](float x) { return static_cast<T>(x) * kept; });
    }
    j += used;
  }
}

template void draw_row(uint64_t, int64_t, const Span&, uint64_t, float, float*);
template void draw_row(uint64_t, int64_t, const Span&, uint64_t, double, double*);

}  // namespace annulus
#endif  // HWY_ONCE
