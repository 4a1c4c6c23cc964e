// Tests that the tags of MPI messages are within the library's bound and distinguish a message from its neighbours.
#include "comm/mpi/message_tags.h"

#include <gtest/gtest.h>

#include <set>

namespace annulus::mpi_internal::mpi_tags_test {
namespace {

constexpr auto kLastDtype = static_cast<c10::ScalarType>(static_cast<int>(c10::ScalarType::NumOptions) - 1);

// Returns the number of consecutive messages with different tags, a power of two.
int64_t period(const MessageTags& tags) {
  const auto tag = [&](int64_t sequence) { return tags.of(sequence, c10::ScalarType::Byte); };
  int64_t count = 1;
  while (tag(count) != tag(0)) count *= 2;
  return count;
}

TEST(MessageTags, StayBelowTheBoundForAnySequenceNumber) {
  for (const int64_t bound :
       {int64_t{32767}, int64_t{65535}, int64_t{4194303}, int64_t{8388607}, int64_t{2147483647}}) {
    const MessageTags tags(bound);
    // The first sequence number that needs more bits than the tag has, and numbers after years of training.
    for (const int64_t sequence : {int64_t{0}, period(tags) - 1, period(tags), period(tags) + 1, int64_t{1} << 31,
                                   (int64_t{1} << 40) + 5, INT64_MAX}) {
      for (const c10::ScalarType dtype : {c10::ScalarType::Byte, c10::ScalarType::Float, kLastDtype}) {
        const int tag = tags.of(sequence, dtype);
        EXPECT_GE(tag, 0) << bound << " " << sequence;
        EXPECT_LE(tag, bound) << bound << " " << sequence;
        const int lent = MessageTags::lent(tag);
        EXPECT_LE(lent, bound) << bound << " " << sequence;
        EXPECT_FALSE(MessageTags::is_lent(tag));
        EXPECT_TRUE(MessageTags::is_lent(lent));
        EXPECT_EQ(MessageTags::not_lent(lent), tag);
        for (const int either : {tag, lent}) {
          EXPECT_EQ(MessageTags::sequence_of(either), sequence % period(tags)) << bound << " " << sequence;
          EXPECT_EQ(MessageTags::dtype_of(either), dtype) << bound << " " << sequence;
        }
      }
    }
  }
}

TEST(MessageTags, UseTheWholeRangeOfTags) {
  EXPECT_EQ(period(MessageTags(32767)), 256);
  EXPECT_EQ(period(MessageTags(2147483647)), int64_t{1} << 23);
  EXPECT_EQ(period(MessageTags(8388607)), int64_t{1} << 16);
}

TEST(MessageTags, DifferWithinAPeriod) {
  const MessageTags tags(32767);
  std::set<int> seen;
  for (int64_t sequence = 0; sequence < period(tags); ++sequence) {
    EXPECT_TRUE(seen.insert(tags.of(sequence, c10::ScalarType::Float)).second) << sequence;
    EXPECT_TRUE(seen.insert(tags.of(sequence, c10::ScalarType::BFloat16)).second) << sequence;
  }
  EXPECT_EQ(tags.of(period(tags), c10::ScalarType::Float), tags.of(0, c10::ScalarType::Float));
}

}  // namespace
}  // namespace annulus::mpi_internal::mpi_tags_test
