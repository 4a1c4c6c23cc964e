// See row_math.h. Vectors of the compiler's, 16 floats wide: the same source becomes AVX-512, AVX2 or plain SSE2 or
// NEON code; which of them runs is looked up once.
#include "attention/cpu_flash/row_math.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace annulus {
namespace {

#define ANNULUS_INLINE inline __attribute__((always_inline))

constexpr int64_t kLanes = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));

constexpr float kInfinity = std::numeric_limits<float>::infinity();

ANNULUS_INLINE void load(const float* x, Floats& v) { std::memcpy(&v, x, sizeof v); }
ANNULUS_INLINE void store(float* x, const Floats& v) { std::memcpy(x, &v, sizeof v); }
// The last n < kLanes elements of a row, filled up with `rest`.
ANNULUS_INLINE void load_some(const float* x, int64_t n, float rest, Floats& v) {
  v = Floats{} + rest;
  std::memcpy(&v, x, static_cast<size_t>(n) * sizeof(float));
}
ANNULUS_INLINE void store_some(float* x, int64_t n, const Floats& v) {
  std::memcpy(x, &v, static_cast<size_t>(n) * sizeof(float));
}

// exp(x) to 2 units in the last place: x = n ln 2 + r, |r| <= ln 2 / 2, and a polynomial in r (the coefficients of
// Cephes' expf). Below -87 (results below the smallest normal number) 0, above 88 infinite, NaN for NaN.
ANNULUS_INLINE void exponential(Floats& x) {
  constexpr float kRound = 12582912.0f;  // 1.5 x 2^23: adding it rounds to an integer in the low bits
  const Ints tiny = x<-87.0f, huge = x> 88.0f;
  const Floats shifted = x * 1.44269504088896341f + kRound;
  const Floats n = shifted - kRound;
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  Ints bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits << 23) + (127 << 23);  // 2^n: the low bits of `shifted` are n
  Floats power;
  std::memcpy(&power, &bits, sizeof power);
  p = p * power;
  p = huge ? Floats{} + kInfinity : p;
  x = tiny ? Floats{} : p;
}

ANNULUS_INLINE float max_of(const float* x, int64_t n, float floor) {
  Floats most = Floats{} + floor, v;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    load(x + i, v);
    most = v > most ? v : most;
  }
  if (i < n) {
    load_some(x + i, n - i, floor, v);
    most = v > most ? v : most;
  }
  float result = floor;
  for (int64_t j = 0; j < kLanes; ++j) result = std::max(result, most[j]);
  return result;
}

ANNULUS_INLINE float exp_of(float* x, int64_t n, float shift) {
  Floats sum = {}, v;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    load(x + i, v);
    v -= shift;
    exponential(v);
    sum += v;
    store(x + i, v);
  }
  if (i < n) {
    load_some(x + i, n - i, -kInfinity, v);
    v -= shift;
    exponential(v);
    sum += v;
    store_some(x + i, n - i, v);
  }
  float result = 0;
  for (int64_t j = 0; j < kLanes; ++j) result += sum[j];
  return result;
}

ANNULUS_INLINE void gradient_of(float* p, float* ds, int64_t n, float lse, float delta) {
  Floats v, d;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    load(p + i, v);
    load(ds + i, d);
    v -= lse;
    exponential(v);
    store(p + i, v);
    store(ds + i, v * (d - delta));
  }
  if (i < n) {
    load_some(p + i, n - i, -kInfinity, v);
    load_some(ds + i, n - i, 0, d);
    v -= lse;
    exponential(v);
    store_some(p + i, n - i, v);
    store_some(ds + i, n - i, v * (d - delta));
  }
}

struct Passes {
  const char* name;
  float (*max)(const float*, int64_t, float);
  float (*exp)(float*, int64_t, float);
  void (*gradient)(float*, float*, int64_t, float, float);
};

// One set of the three passes, compiled with the attribute given.
#define ANNULUS_PASSES(NAME, TEXT, ATTRIBUTE)                                                        \
  ATTRIBUTE float max_##NAME(const float* x, int64_t n, float floor) { return max_of(x, n, floor); } \
  ATTRIBUTE float exp_##NAME(float* x, int64_t n, float shift) { return exp_of(x, n, shift); }       \
  ATTRIBUTE void gradient_##NAME(float* p, float* ds, int64_t n, float lse, float delta) {           \
    gradient_of(p, ds, n, lse, delta);                                                               \
  }                                                                                                  \
  constexpr Passes k_##NAME = {TEXT, max_##NAME, exp_##NAME, gradient_##NAME};

ANNULUS_PASSES(plain, "plain", )
#if defined(__x86_64__)
ANNULUS_PASSES(avx2, "AVX2", __attribute__((target("avx2,fma"))))
ANNULUS_PASSES(avx512, "AVX-512",
               __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,prefer-vector-width=512"))))
#endif

const Passes& passes() {
  static const Passes chosen = [] {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl")) {
      return k_avx512;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return k_avx2;
#endif
    return k_plain;
  }();
  return chosen;
}

}  // namespace

const char* row_math_instructions() { return passes().name; }

float row_max(const float* x, int64_t n, float floor) { return passes().max(x, n, floor); }
float row_exp(float* x, int64_t n, float shift) { return passes().exp(x, n, shift); }
void row_gradient(float* p, float* ds, int64_t n, float lse, float delta) { passes().gradient(p, ds, n, lse, delta); }

// fp64 is for checks, not for speed.
double row_max(const double* x, int64_t n, double floor) {
  for (int64_t i = 0; i < n; ++i) floor = x[i] > floor ? x[i] : floor;
  return floor;
}
double row_exp(double* x, int64_t n, double shift) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i] = std::exp(x[i] - shift);
  return sum;
}
void row_gradient(double* p, double* ds, int64_t n, double lse, double delta) {
  for (int64_t i = 0; i < n; ++i) {
    p[i] = std::exp(p[i] - lse);
    ds[i] = p[i] * (ds[i] - delta);
  }
}

}  // namespace annulus
