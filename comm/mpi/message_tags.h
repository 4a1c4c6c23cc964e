// The tag of a point-to-point message: which message between its two ranks it is, and of what dtype. Used by
// mpi_communicator.cc; without MPI, so that its tests need none.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>

namespace annulus::mpi_internal {

class MessageTags {
 public:
  // upper_bound: the highest tag that this MPI takes (MPI_TAG_UB), at least the 32767 that MPI guarantees.
  explicit MessageTags(int64_t upper_bound) {
    int bits = 15;
    while (bits < 30 && (int64_t{2} << bits) - 1 <= upper_bound) ++bits;
    sequence_mask_ = (int64_t{1} << (bits - kDtypeBits)) - 1;
  }

  // sequence: messages between the two ranks so far. Begins anew when the tags are used up: MPI keeps the order of
  // messages between two ranks, so a tag need only tell a message from those shortly before and after it.
  int of(int64_t sequence, c10::ScalarType dtype) const {
    return static_cast<int>((sequence & sequence_mask_) << kDtypeBits) | static_cast<int>(dtype);
  }
  static int64_t sequence_of(int tag) { return tag >> kDtypeBits; }
  static c10::ScalarType dtype_of(int tag) { return static_cast<c10::ScalarType>(tag & ((1 << kDtypeBits) - 1)); }

 private:
  static constexpr int kDtypeBits = 6;
  static_assert(static_cast<int>(c10::ScalarType::NumOptions) <= 1 << kDtypeBits);
  int64_t sequence_mask_ = 0;
};

}  // namespace annulus::mpi_internal
