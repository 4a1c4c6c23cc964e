// Philox in vectors, compiled once for each instruction set; see draws.h.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention/tiles/draws.cc"
#include "simd/versions.h"

#include <algorithm>

#include "attention/tiles/draws.h"

#ifndef ANNULUS_DRAWS_PHILOX_
#define ANNULUS_DRAWS_PHILOX_
namespace annulus::draws {

constexpr uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
constexpr int kPhiloxRounds = 10;

// Computes the four words of one counter, which has the group of keys in its low 64 bits and the query in its high
// ones.
inline void philox(uint64_t key, uint64_t query, uint64_t group, uint32_t (&words)[4]) {
  uint32_t a = static_cast<uint32_t>(group), b = static_cast<uint32_t>(group >> 32);
  uint32_t c = static_cast<uint32_t>(query), d = static_cast<uint32_t>(query >> 32);
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t x = static_cast<uint64_t>(kMultiplier0) * a, y = static_cast<uint64_t>(kMultiplier1) * c;
    a = static_cast<uint32_t>(y >> 32) ^ b ^ k0;
    b = static_cast<uint32_t>(y);
    c = static_cast<uint32_t>(x >> 32) ^ d ^ k1;
    d = static_cast<uint32_t>(x);
    k0 += kWeyl0, k1 += kWeyl1;
  }
  words[0] = a, words[1] = b, words[2] = c, words[3] = d;
}

struct Groups {
  // Writes, for the four words of each of the groups first, ..., first + count - 1, 1 if the word is above `last` and 0
  // otherwise. count is a multiple of lanes. The low 32 bits of the groups' numbers must not overflow.
  void (*stay)(uint64_t key, uint64_t query, uint64_t first, int64_t count, uint32_t last, float* to);
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
void stay(uint64_t key, uint64_t query, uint64_t first, int64_t count, uint32_t last, float* to) {
  for (int64_t g = 0; g < count; ++g) {
    uint32_t four[4];
    philox(key, query, first + static_cast<uint64_t>(g), four);
    for (int w = 0; w < 4; ++w) to[4 * g + w] = four[w] > last ? 1.0f : 0.0f;
  }
}
constexpr Groups kGroups = {stay, 1};
#else
using Words = hn::ScalableTag<uint32_t>;
using V = hn::Vec<Words>;

// The high and the low halves of the 64-bit products of 32-bit lanes.
HWY_INLINE void multiply(V x, V m, V& high, V& low) {
  const Words d;
  const hn::RepartitionToWide<Words> wide;
  const auto even = hn::BitCast(d, hn::MulEven(x, m));
  const auto odd = hn::BitCast(d, hn::MulEven(hn::BitCast(d, hn::ShiftRight<32>(hn::BitCast(wide, x))), m));
  high = hn::OddEven(odd, hn::BitCast(d, hn::ShiftRight<32>(hn::BitCast(wide, even))));
  low = hn::OddEven(hn::BitCast(d, hn::ShiftLeft<32>(hn::BitCast(wide, odd))), even);
}

// 1 where the word is above `most`, else 0.
HWY_INLINE hn::Vec<hn::ScalableTag<float> > above(V word, V most) {
  const hn::ScalableTag<float> f;
  return hn::IfThenElseZero(hn::RebindMask(f, hn::Gt(word, most)), hn::Set(f, 1.0f));
}

void stay(uint64_t key, uint64_t query, uint64_t first, int64_t count, uint32_t last, float* to) {
  const Words d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto m0 = hn::Set(d, kMultiplier0), m1 = hn::Set(d, kMultiplier1);
  for (int64_t g = 0; g < count; g += lanes) {
    const uint64_t group = first + static_cast<uint64_t>(g);
    auto a = hn::Iota(d, static_cast<uint32_t>(group)), b = hn::Set(d, static_cast<uint32_t>(group >> 32));
    auto c = hn::Set(d, static_cast<uint32_t>(query)), e = hn::Set(d, static_cast<uint32_t>(query >> 32));
    auto k0 = hn::Set(d, static_cast<uint32_t>(key)), k1 = hn::Set(d, static_cast<uint32_t>(key >> 32));
    for (int round = 0; round < kPhiloxRounds; ++round) {
      V high0, low0, high1, low1;
      multiply(a, m0, high0, low0);
      multiply(c, m1, high1, low1);
      a = hn::Xor(hn::Xor(high1, b), k0);
      c = hn::Xor(hn::Xor(high0, e), k1);
      b = low1, e = low0;
      k0 = hn::Add(k0, hn::Set(d, kWeyl0));
      k1 = hn::Add(k1, hn::Set(d, kWeyl1));
    }
    const auto most = hn::Set(d, last);
    hn::StoreInterleaved4(above(a, most), above(b, most), above(c, most), above(e, most), hn::ScalableTag<float>(),
                          to + 4 * g);
  }
}
constexpr Groups kGroups = {stay, static_cast<int64_t>(hn::MaxLanes(Words()))};
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
  float stay[4 * kMost];
  const auto row = static_cast<uint64_t>(query);
  if (threshold == 0) {
    std::fill_n(factors, keys.count, kept);
    return;
  }
  const auto last = static_cast<uint32_t>(threshold - 1);  // the threshold itself may need 33 bits
  for (int64_t j = 0; j < keys.count;) {
    const int64_t first = keys.at(j) / 4;
    if (keys.stride == 1 && first % (int64_t{1} << 32) < (int64_t{1} << 32) - kMost) {
      // All words of a run of groups, of which the first and the last may be used in part.
      const int64_t past = std::min(keys.last() / 4 + 1, first + kMost);
      const int64_t count = (past - first + groups.lanes - 1) / groups.lanes * groups.lanes;
      groups.stay(philox_key, row, static_cast<uint64_t>(first), count, last, stay);
      const int64_t end = std::min(keys.count, 4 * past - keys.begin);
      const float* of_key = stay + (keys.at(j) - 4 * first);
      for (; j < end; ++j) factors[j] = static_cast<T>(*of_key++) * kept;
    } else {
      uint32_t four[4];
      draws::philox(philox_key, row, static_cast<uint64_t>(first), four);
      for (; j < keys.count && keys.at(j) / 4 == first; ++j) factors[j] = four[keys.at(j) % 4] > last ? kept : T{0};
    }
  }
}

template void draw_row(uint64_t, int64_t, const Span&, uint64_t, float, float*);
template void draw_row(uint64_t, int64_t, const Span&, uint64_t, double, double*);

}  // namespace annulus
#endif  // HWY_ONCE
