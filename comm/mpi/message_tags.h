// The tag of a point-to-point message: it holds the number of the message between its two ranks, and the dtype. Used by
// mpi_communicator.cc. It does not use MPI, so its tests do not need MPI.
//
// Example: with an upper bound of 32767 a tag has 15 bits, 6 for the dtype and 9 for the number, which starts again
// from 0 after 512 messages. Message 3 of fp32 (ScalarType 6) has the tag 3 * 64 + 6 = 198.
//
// Thread safety: immutable after construction.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>

namespace annulus::mpi_internal {

class MessageTags {
 public:
  // upper_bound: the highest tag that this MPI allows (MPI_TAG_UB). MPI guarantees at least 32767.
  explicit MessageTags(int64_t upper_bound) {
    int bits = 15;
    while (bits < 30 && (int64_t{2} << bits) - 1 <= upper_bound) ++bits;
    sequence_mask_ = (int64_t{1} << (bits - kDtypeBits)) - 1;
  }

  // sequence: the number of messages from the one rank to the other before this one. When the tags are used up, the
  // numbers start again: MPI keeps the order of messages between two ranks, so a tag only has to distinguish a message
  // from those shortly before and after it.
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
