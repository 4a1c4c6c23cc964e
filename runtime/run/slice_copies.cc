// See slice_copies.h.
#include "runtime/run/slice_copies.h"

#include <c10/core/ScalarType.h>

#include <algorithm>

#include "memory/pool/pool_tensor.h"

namespace annulus {
namespace {

constexpr int64_t kReadAtOnce = int64_t{16} << 20;  // bytes of a tier

int64_t size_of(const TensorSlice& slice) {
  return static_cast<int64_t>(c10::elementSize(slice.elements().scalar_type()));
}

// Returns the bytes that a copy takes, up to the beginning of the next.
int64_t taken_by(const TensorSlice& slice) {
  const int64_t bytes = slice.elements().numel() * size_of(slice);
  return (bytes + SliceCopies::kAligned - 1) / SliceCopies::kAligned * SliceCopies::kAligned;
}

}  // namespace

std::vector<TensorSlice> SliceCopies::copy(const std::vector<TensorSlice>& slices) {
  int64_t total = 0;
  for (const TensorSlice& slice : slices) total += taken_by(slice);
  if (!memory_.defined() || bytes() < total) {
    memory_.reset();  // before more is taken
    memory_ = pool_tensor({total}, at::kByte, PoolPurpose::kSaving);
  }
  std::vector<TensorSlice> copies;
  int64_t begin = 0;
  for (const TensorSlice& slice : slices) {
    const PlacedVector from = slice.elements();
    const int64_t count = from.numel(), size = size_of(slice);
    at::Tensor to = memory_.narrow(0, begin, count * size).view(from.scalar_type());
    if (from.tier == nullptr) {
      to.copy_(from.tensor.detach());
    } else {
      for (int64_t at = 0; at < count; at += kReadAtOnce / size) {
        const int64_t n = std::min(kReadAtOnce / size, count - at);
        to.narrow(0, at, n).copy_(from.read(at, n));
      }
    }
    copies.push_back({.name = slice.name, .shape = slice.shape, .begin = slice.begin, .values = std::move(to)});
    begin += taken_by(slice);
  }
  return copies;
}

}  // namespace annulus
