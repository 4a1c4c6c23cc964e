// Implements bf16_flops of fma_peak.h, whose instructions Debian's Highway does not have.
#include <cstdint>

#include "benchmarks/fma_peak.h"
#include "benchmarks/measure.h"
#include "common/simd/amx.h"
#include "common/simd/avx512_bf16.h"
#include "common/simd/instruction_set.h"

#if HWY_ARCH_X86_64
HWY_PUSH_ATTRIBUTES(ANNULUS_AVX512_BF16)
namespace annulus {
namespace {

constexpr int kSums = 12;  // enough for a core whose products take up to six cycles, and that starts two in a cycle

// Adds products to independent sums, which begin with different values, so that the compiler cannot merge them.
HWY_NOINLINE float add_products(int64_t steps) {
  const __m512bh x = (__m512bh)_mm512_set1_epi16(0x3f7f), y = (__m512bh)_mm512_set1_epi16(0x3c00);
  __m512 sums[kSums];
#pragma GCC unroll 12
  for (int i = 0; i < kSums; ++i) sums[i] = _mm512_set1_ps(static_cast<float>(i));
  for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) sums[i] = _mm512_dpbf16_ps(sums[i], x, y);
  }
  for (int i = 1; i < kSums; ++i) sums[0] = _mm512_add_ps(sums[0], sums[i]);
  return _mm512_cvtss_f32(sums[0]);
}

// The same with the tiles of AMX, `kTileSums` products of 16 x 16 x 32 numbers a step. It computes with zeros, which
// take as long as other numbers.
constexpr int kTileSums = 4;
void add_tile_products(int64_t steps) {
  configure_tiles();
  for (int64_t step = 0; step < steps; ++step) {
    ANNULUS_TILE_MULTIPLY(0, 4, 6);
    ANNULUS_TILE_MULTIPLY(1, 4, 7);
    ANNULUS_TILE_MULTIPLY(2, 5, 6);
    ANNULUS_TILE_MULTIPLY(3, 5, 7);
  }
  release_tiles();
}

}  // namespace
}  // namespace annulus
HWY_POP_ATTRIBUTES
#endif  // HWY_ARCH_X86_64

namespace annulus {

std::optional<double> bf16_flops() {
#if HWY_ARCH_X86_64
  if (instruction_set() >= InstructionSet::kAvx512Bf16) {
    constexpr int64_t kSteps = 40000;
    volatile float result = 0;  // keeps the compiler from removing the products
    if (instruction_set() == InstructionSet::kAmx) {
      return 2.0 * 16 * 16 * 32 * kTileSums * kSteps / least_seconds([] { add_tile_products(kSteps); });
    }
    return 4.0 * 16 * kSums * kSteps / least_seconds([&] { result = result + add_products(kSteps); });
  }
#endif
  return std::nullopt;
}

}  // namespace annulus
