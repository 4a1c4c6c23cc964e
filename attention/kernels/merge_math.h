// The weights of one row's merge, for the CPU's loop (merge.cc) and the device's kernel (merge.cu). Internal to
// attention/kernels.
#pragma once

#include <cmath>

#ifdef __CUDACC__
#define ANNULUS_HOST_DEVICE __host__ __device__
#else
#define ANNULUS_HOST_DEVICE
#endif

namespace annulus {

template <typename T>
struct MergeWeights {
  T share;  // of the part in the merged out
  T lse;    // of both
};

// sigmoid(theirs - mine) and mine + softplus(theirs - mine), from the smaller exponential: no overflow. theirs is not
// -inf (a part without keys changes nothing); mine may be.
template <typename T>
ANNULUS_HOST_DEVICE inline MergeWeights<T> merge_weights(T mine, T theirs) {
  const T difference = theirs - mine;
  const T e = std::exp(-std::abs(difference));
  return {difference >= 0 ? 1 / (1 + e) : e / (1 + e), (difference >= 0 ? theirs : mine) + std::log1p(e)};
}

}  // namespace annulus
