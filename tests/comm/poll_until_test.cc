// Tests that a rank that waits over MPI makes few calls where each takes long, because ranks share cores.
#include "comm/mpi/poll_until.h"

#include <gtest/gtest.h>

#include <chrono>

#include "comm/deadline.h"

namespace annulus::mpi_internal::poll_until_test {
namespace {

using comm_internal::Clock;

// Waits for a message that does not come, with calls of 100 us, and returns how many calls were made.
int calls_in_vain(Movement moved, std::chrono::milliseconds limit) {
  int calls = 0;
  const auto call = [&] {
    ++calls;
    for (const auto end = Clock::now() + std::chrono::microseconds(100); Clock::now() < end;) continue;
    return false;
  };
  EXPECT_FALSE(poll_until(
      call, [&] { return moved; }, Clock::now() + limit));
  return calls;
}

// Each call is followed by a pause of an eighth of the time waited, which so grows by an eighth from 100 us to 8 ms, 37
// times; then 32 pauses of 1 ms and as many calls reach 40 ms. The first calls and the last one come on top. The speed
// of the machine does not matter, since longer calls and pauses are fewer.
TEST(PollUntil, MakesOneLongCallBetweenPauses) {
  EXPECT_LE(calls_in_vain({.events = 0, .open = 8}, std::chrono::milliseconds(40)), 80);
  EXPECT_LE(calls_in_vain({.events = 3, .open = 8}, std::chrono::milliseconds(40)), 80);
}

TEST(PollUntil, ReturnsTrueAsSoonAsItIsDone) {
  int calls = 0;
  const auto done = [&] { return ++calls == 50; };
  EXPECT_TRUE(poll_until(
      done, [] { return Movement{}; }, Clock::now() + std::chrono::minutes(1)));
  EXPECT_EQ(calls, 50);
}

}  // namespace
}  // namespace annulus::mpi_internal::poll_until_test
