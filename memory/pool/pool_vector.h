// Vectors whose elements lie in memory of the pool of the process. Used by kernels for their scratch. Needs no
// LibTorch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#include "memory/pool/pool.h"

namespace annulus {

// An allocator for containers of the standard library. Memory is aligned to cache lines. New elements are uninitialized
// unless they are given a value: zeroing them would cost more than a hundredth of a short call of attention. Thread
// safe.
template <typename T, PoolPurpose kPurpose>
struct PoolAllocator {
  using value_type = T;
  template <typename U>
  struct rebind {
    using other = PoolAllocator<U, kPurpose>;
  };

  PoolAllocator() = default;
  template <typename U>
  PoolAllocator(const PoolAllocator<U, kPurpose>&) {}  // NOLINT(google-explicit-constructor): the standard's form

  T* allocate(size_t n) { return static_cast<T*>(Pool::process().get(static_cast<int64_t>(n * sizeof(T)), kPurpose)); }
  template <typename U>
  void construct(U* element) {
    ::new (static_cast<void*>(element)) U;  // std::allocator would zero it
  }
  void deallocate(T* memory, size_t) { Pool::process().put(memory, kPurpose); }

  friend bool operator==(const PoolAllocator&, const PoolAllocator&) { return true; }
};

template <typename T, PoolPurpose kPurpose>
using PoolVector = std::vector<T, PoolAllocator<T, kPurpose>>;

}  // namespace annulus
