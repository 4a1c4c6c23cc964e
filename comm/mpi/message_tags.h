// The tag of a point-to-point message: it holds the number of the message between its two ranks, the dtype, and whether
// the message is the tensor's address instead of its elements (memory/pool/shared_memory.h). Used by
// mpi_communicator.cc. It does not use MPI, so its tests do not need MPI.
//
// Example: with an upper bound of 32767 a tag has 15 bits, 6 for the dtype, 1 for lending and 8 for the number, which
// starts again from 0 after 256 messages. Message 3 of fp32 (ScalarType 6) has the tag 3 * 128 + 6 = 390, and 454 (64
// more) if it is lent.
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
    sequence_mask_ = (int64_t{1} << (bits - kLowBits)) - 1;
  }

  // sequence: the number of messages from the one rank to the other before this one. When the tags are used up, the
  // numbers start again: MPI keeps the order of messages between two ranks, so a tag only has to distinguish a message
  // from those shortly before and after it.
  int of(int64_t sequence, c10::ScalarType dtype) const {
    return static_cast<int>((sequence & sequence_mask_) << kLowBits) | static_cast<int>(dtype);
  }
  static int lent(int tag) { return tag | kLent; }
  static bool is_lent(int tag) { return (tag & kLent) != 0; }
  static int not_lent(int tag) { return tag & ~kLent; }
  static int64_t sequence_of(int tag) { return tag >> kLowBits; }
  static c10::ScalarType dtype_of(int tag) { return static_cast<c10::ScalarType>(tag & ((1 << kDtypeBits) - 1)); }

 private:
  static constexpr int kDtypeBits = 6;
  static constexpr int kLent = 1 << kDtypeBits;
  static constexpr int kLowBits = kDtypeBits + 1;
  static_assert(static_cast<int>(c10::ScalarType::NumOptions) <= 1 << kDtypeBits);
  int64_t sequence_mask_ = 0;
};

}  // namespace annulus::mpi_internal
