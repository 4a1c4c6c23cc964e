// A vectorized store for GPUs. nvcc may split the assignment of a struct into one store per member: CUDA 13.0 compiled
// that of eight 16-bit values in SwiGLU to eight stores. Used by the kernels of runtime/model/gpu and attention/tiles.
// Includes neither LibTorch nor CUDA's headers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __CUDACC__
#define ANNULUS_EITHER __host__ __device__ __forceinline__
#else
#define ANNULUS_EITHER inline
#endif

namespace annulus {

// Assigns `value` to `*to`, which on a GPU must lie in global memory. There a value whose size is 8 bytes or a multiple
// of 16, with the same alignment, is written by stores of 8 or 16 bytes.
template <typename Value>
ANNULUS_EITHER void store_whole(Value* to, const Value& value) {
#ifdef __CUDA_ARCH__
  static_assert(std::is_trivially_copyable_v<Value>);
  constexpr bool kOf16 = sizeof(Value) % 16 == 0 && alignof(Value) % 16 == 0;
  constexpr bool kOf8 = sizeof(Value) == 8 && alignof(Value) == 8;
  if constexpr (kOf16 || kOf8) {
    uint32_t words[sizeof(Value) / sizeof(uint32_t)];
    std::memcpy(words, &value, sizeof(value));
    const size_t address = __cvta_generic_to_global(to);
    if constexpr (kOf8) {
      asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(words[0]), "r"(words[1]) : "memory");
    } else {
#pragma unroll
      for (size_t i = 0; i < sizeof(Value) / 16; ++i) {
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address + 16 * i), "r"(words[4 * i]),
                     "r"(words[4 * i + 1]), "r"(words[4 * i + 2]), "r"(words[4 * i + 3])
                     : "memory");
      }
    }
    return;
  }
#endif
  *to = value;
}

}  // namespace annulus

#undef ANNULUS_EITHER
