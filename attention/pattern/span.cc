// Clips, intersects and prints spans; see span.h.
#include "attention/pattern/span.h"

#include <numeric>
#include <utility>

namespace annulus {
namespace {

using Wide = __int128;  // products of two positions (2^40) and their strides do not fit 64 bits

// The x in [0, m) with a x = 1 (mod m); a and m are coprime, m >= 1.
int64_t inverse(int64_t a, int64_t m) {
  int64_t r0 = m, r1 = a % m, t0 = 0, t1 = 1;
  while (r1 != 0) {
    const int64_t quotient = r0 / r1;
    r0 = std::exchange(r1, r0 - quotient * r1);
    t0 = std::exchange(t1, t0 - quotient * t1);
  }
  return t0 < 0 ? t0 + m : t0;
}

}  // namespace

Span Span::clip(int64_t lo, int64_t hi) const {
  if (empty() || lo > hi) return {begin, stride, 0};
  const int64_t first = lo <= begin ? 0 : ceil_div(lo - begin, stride);
  const int64_t past = hi < begin ? 0 : std::min(count, floor_div(hi - begin, stride) + 1);
  if (first >= past) return {begin, stride, 0};
  return sub(first, past - first);
}

Span intersect(const Span& a, const Span& b) {
  if (a.empty() || b.empty()) return {};
  const int64_t lo = std::max(a.begin, b.begin);
  const int64_t hi = std::min(a.last(), b.last());
  if (a.stride == 1) return b.clip(lo, hi);
  if (b.stride == 1) return a.clip(lo, hi);
  if (lo > hi) return {};
  const int64_t g = std::gcd(a.stride, b.stride);
  if ((b.begin - a.begin) % g != 0) return {};
  // x = a.begin + a.stride * t with x = b.begin (mod b.stride): t is determined modulo b.stride / g.
  const int64_t m = b.stride / g;
  const int64_t difference = ((b.begin - a.begin) / g % m + m) % m;
  const int64_t t = static_cast<int64_t>(Wide{difference} * inverse(a.stride / g, m) % m);
  const Wide lcm = Wide{a.stride} * m;
  Wide x = Wide{a.begin} + Wide{a.stride} * t;
  if (x < lo) x += (lo - x + lcm - 1) / lcm * lcm;
  if (x > hi) return {};
  const int64_t count = static_cast<int64_t>((hi - x) / lcm) + 1;
  // A single member needs no stride; the least common multiple might not even fit.
  return {static_cast<int64_t>(x), count == 1 ? 1 : static_cast<int64_t>(lcm), count};
}

std::string to_string(const Span& s) {
  if (s.empty()) return "[]";
  std::string text = "[" + std::to_string(s.begin) + ".." + std::to_string(s.last());
  if (s.stride != 1 && s.count > 1) text += " step " + std::to_string(s.stride);
  return text + "]";
}

std::string to_string(const Band& b) {
  const auto side = [](int64_t value) -> std::string {
    if (value <= -Band::kUnbounded) return "-inf";
    if (value >= Band::kUnbounded) return "inf";
    return std::to_string(value);
  };
  return side(b.lo) + " <= key - query <= " + side(b.hi);
}

}  // namespace annulus
