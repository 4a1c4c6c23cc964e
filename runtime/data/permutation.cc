// See permutation.h.
#include "runtime/data/permutation.h"

#include "common/error.h"
#include "common/splitmix64.h"

namespace annulus {

KeyedPermutation::KeyedPermutation(int64_t n, uint64_t key) : n_(n) {
  if (n < 1) throw Error(ErrorKind::kInternal, "data", "a permutation of no numbers was asked for");
  while (half_ < 31 && (int64_t{1} << (2 * half_)) < n) ++half_;
  for (uint64_t& round : keys_) round = key = splitmix64(key);
}

int64_t KeyedPermutation::at(int64_t i) const {
  if (i < 0 || i >= n_) throw Error(ErrorKind::kInternal, "data", "a number beyond the permutation was asked for");
  const uint64_t mask = (uint64_t{1} << half_) - 1;
  auto value = static_cast<uint64_t>(i);
  do {
    uint64_t left = value >> half_, right = value & mask;
    for (const uint64_t key : keys_) {
      const uint64_t next = left ^ (splitmix64(right ^ key) & mask);
      left = right;
      right = next;
    }
    value = left << half_ | right;
  } while (value >= static_cast<uint64_t>(n_));
  return static_cast<int64_t>(value);
}

}  // namespace annulus
