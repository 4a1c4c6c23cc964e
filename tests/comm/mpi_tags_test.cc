// The tags of messages over MPI: within what the library takes, and telling a message from its neighbours.
#include "comm/mpi/message_tags.h"

#include <gtest/gtest.h>

#include <set>

namespace annulus::mpi_internal {
namespace {

constexpr auto kLastDtype = static_cast<c10::ScalarType>(static_cast<int>(c10::ScalarType::NumOptions) - 1);

TEST(MessageTags, StayBelowTheBoundHoweverManyMessagesThereWere) {
  for (const int64_t bound :
       {int64_t{32767}, int64_t{65535}, int64_t{4194303}, int64_t{8388607}, int64_t{2147483647}}) {
    const MessageTags tags(bound);
    // The first message whose number needs more bits than the tag has, and others after years of training.
    for (const int64_t sequence : {int64_t{0}, tags.period() - 1, tags.period(), tags.period() + 1, int64_t{1} << 31,
                                   (int64_t{1} << 40) + 5, INT64_MAX}) {
      for (const c10::ScalarType dtype : {c10::ScalarType::Byte, c10::ScalarType::Float, kLastDtype}) {
        const int tag = tags.of(sequence, dtype);
        EXPECT_GE(tag, 0) << bound << " " << sequence;
        EXPECT_LE(tag, bound) << bound << " " << sequence;
        EXPECT_EQ(MessageTags::sequence_of(tag), sequence % tags.period()) << bound << " " << sequence;
        EXPECT_EQ(MessageTags::dtype_of(tag), dtype) << bound << " " << sequence;
      }
    }
  }
}

TEST(MessageTags, UseWhatTheLibraryGives) {
  EXPECT_EQ(MessageTags(32767).period(), 512);
  EXPECT_EQ(MessageTags(2147483647).period(), int64_t{1} << 24);
  EXPECT_EQ(MessageTags(8388607).period(), int64_t{1} << 17);
}

TEST(MessageTags, DifferWithinAPeriod) {
  const MessageTags tags(32767);
  std::set<int> seen;
  for (int64_t sequence = 0; sequence < tags.period(); ++sequence) {
    EXPECT_TRUE(seen.insert(tags.of(sequence, c10::ScalarType::Float)).second) << sequence;
    EXPECT_TRUE(seen.insert(tags.of(sequence, c10::ScalarType::BFloat16)).second) << sequence;
  }
  EXPECT_EQ(tags.of(tags.period(), c10::ScalarType::Float), tags.of(0, c10::ScalarType::Float));
}

}  // namespace
}  // namespace annulus::mpi_internal
