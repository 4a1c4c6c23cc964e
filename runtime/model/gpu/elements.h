// Element types of the kernels' tensors, and vectorized loads and stores. Used by the kernels of this folder. nvcc
// compiles the source for GPUs, and the host compiler for tests on a CPU (tests/runtime/model/gpu/fiber_launcher.h).
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cassert>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/simd/device_store.h"

#ifdef __CUDACC__
#define ANNULUS_DEVICE __device__ __forceinline__
#define ANNULUS_UNROLL _Pragma("unroll")
#define ANNULUS_PRAGMA(text) _Pragma(#text)
#define ANNULUS_UNROLL_BY(times) ANNULUS_PRAGMA(unroll times)
#else
#define ANNULUS_DEVICE inline
#define ANNULUS_UNROLL
#define ANNULUS_UNROLL_BY(times)
#endif

namespace annulus::gpu {

// The type of a tensor's elements. Statistics and all arithmetic are fp32.
enum class Element { kFloat, kBFloat16, kHalf };

inline constexpr int64_t bytes_of(Element element) { return element == Element::kFloat ? 4 : 2; }

// Bytes that a thread loads or stores at once at aligned addresses.
inline constexpr int64_t kVectorBytes = 16;

// The number of elements in kVectorBytes.
template <typename T>
inline constexpr int kVector = static_cast<int>(kVectorBytes / sizeof(T));

template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Pack {
  T value[kWidth];
};

// The address must be a multiple of the pack's size.
template <int kWidth, typename T>
ANNULUS_DEVICE Pack<T, kWidth> load(const T* address) {
#ifdef __CUDACC__
  return *reinterpret_cast<const Pack<T, kWidth>*>(address);
#else
  assert(reinterpret_cast<uintptr_t>(address) % sizeof(Pack<T, kWidth>) == 0);
  Pack<T, kWidth> pack;
  std::memcpy(&pack, address, sizeof(pack));
  return pack;
#endif
}
template <typename T, int kWidth>
ANNULUS_DEVICE void store(T* address, const Pack<T, kWidth>& pack) {
#ifdef __CUDACC__
  store_whole(reinterpret_cast<Pack<T, kWidth>*>(address), pack);
#else
  assert(reinterpret_cast<uintptr_t>(address) % sizeof(pack) == 0);
  std::memcpy(address, &pack, sizeof(pack));
#endif
}

// A pack in its memory representation, initially zeros. nvcc keeps every 16-bit element of a Pack in its own register,
// and unpacks as soon as a load completes, which delays later loads. Here two elements share a register.
template <typename T, int kWidth>
class alignas(sizeof(T) * kWidth) Folded {
 public:
  Folded() = default;
  ANNULUS_DEVICE explicit Folded(const Pack<T, kWidth>& pack) { std::memcpy(words_, &pack, sizeof(pack)); }

  // The address must be a multiple of the pack's size.
  ANNULUS_DEVICE void load_from(const T* address) {
#ifdef __CUDACC__
    *this = *reinterpret_cast<const Folded*>(address);
#else
    *this = Folded(load<kWidth>(address));
#endif
  }
  ANNULUS_DEVICE Pack<T, kWidth> unfold() const {
    Pack<T, kWidth> pack;
    std::memcpy(&pack, words_, sizeof(pack));
    return pack;
  }

 private:
  using Word = std::conditional_t<sizeof(T) * kWidth % sizeof(uint32_t) == 0, uint32_t, uint16_t>;
  Word words_[sizeof(T) * kWidth / sizeof(Word)] = {};
};

// Calls f(T()) with T the type of these elements.
template <typename F>
void by_element(Element element, const F& f) {
  switch (element) {
    case Element::kFloat:
      return f(float());
    case Element::kBFloat16:
      return f(c10::BFloat16());
    case Element::kHalf:
      return f(c10::Half());
  }
}

}  // namespace annulus::gpu
