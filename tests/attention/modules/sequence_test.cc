// Tests what ranks exchange before a call besides their positions: the free memory by which `auto` chooses.
#include "attention/modules/sequence.h"

#include <gtest/gtest.h>

#include "attention/execution/terms_in_job.h"
#include "attention/plan/choice.h"
#include "comm/threads/threads.h"

namespace annulus::sequence_test {
namespace {

constexpr int64_t kMebibyte = int64_t{1} << 20;

TEST(Sequence, TheLeastFreeMemoryOfAllRanksCounts) {
  run_ranks(3, [](Communicator& comm) {
    const auto agree = [&](int64_t free, bool differentiable) {
      return agree_on_call(
          [&]() -> CallTerms {
            return {.queries = 4,
                    .keys = 4,
                    .alike = {},
                    .keep_last = comm.rank() != 1,
                    .lse_gradient = differentiable,
                    .free_bytes = free};
          },
          comm, {"test"});
    };
    const int64_t own[] = {700 * kMebibyte + 5, 300 * kMebibyte + 5, 500 * kMebibyte};
    const SequenceParts parts = agree(own[comm.rank()], comm.rank() == 2);
    EXPECT_EQ(parts.free_bytes, 300 * kMebibyte);
    EXPECT_FALSE(parts.keep_last);
    EXPECT_TRUE(parts.lse_gradient);
    // A rank that does not know its own bounds nothing.
    EXPECT_EQ(agree(comm.rank() == 1 ? 0 : own[comm.rank()], false).free_bytes, 500 * kMebibyte);
    EXPECT_EQ(agree(0, false).free_bytes, 0);
  });
}

// Later calls, and the backward, must not choose otherwise because other tensors have been made meanwhile.
TEST(Sequence, ACommunicatorKeepsTheFreeMemoryOfItsFirstCall) {
  const TermsPointer machine = terms_of("", "test", "cpu", 128, 2);
  run_ranks(2, [&](Communicator& comm) {
    comm.set_hosts({0, 1});
    EXPECT_EQ(terms_in_job(machine, comm)->most_bytes(), 0) << "nothing is known before";
    EXPECT_GT(free_bytes(comm, c10::kCPU), 0);
    const int64_t least = least_free_bytes(comm, c10::kCPU, {"test"});
    EXPECT_GT(least, 0);
    const TermsPointer terms = terms_in_job(machine, comm, 3 * kMebibyte);
    EXPECT_EQ(terms->most_bytes(), 3 * kMebibyte);
    EXPECT_EQ(terms->machine.on_a_host(2), 1);
    EXPECT_EQ(free_bytes(comm, c10::kCPU), 3 * kMebibyte);
    EXPECT_EQ(terms_in_job(machine, comm), terms);
    EXPECT_EQ(least_free_bytes(comm, c10::kCPU, {"test"}), 3 * kMebibyte);
  });
  const auto self = make_self_communicator();
  EXPECT_EQ(free_bytes(*self, c10::kCPU), 0) << "one rank has nothing to choose";
}

}  // namespace
}  // namespace annulus::sequence_test
