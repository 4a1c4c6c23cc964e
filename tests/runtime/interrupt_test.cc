// The first signal asks, a later one ends.
#include "runtime/interrupt.h"

#include <gtest/gtest.h>

#include <csignal>

namespace annulus {
namespace {

TEST(Interrupt, TheFirstSignalSetsTheFlag) {
  install_interrupt_handlers();
  EXPECT_FALSE(interrupted());
  raise(SIGINT);
  EXPECT_TRUE(interrupted());
  EXPECT_EQ(interrupt_exit_code(), 130);
  raise(SIGUSR1);  // the same request by another way
  EXPECT_EQ(interrupt_exit_code(), 130);
  request_interrupt(false);
  EXPECT_FALSE(interrupted());
  raise(SIGUSR1);
  EXPECT_TRUE(interrupted());
  EXPECT_EQ(interrupt_exit_code(), 143);
  request_interrupt(false);
}

TEST(InterruptDeathTest, AnotherOneEndsTheProcess) {
  EXPECT_EXIT(
      {
        install_interrupt_handlers();
        raise(SIGTERM);
        while (true) raise(SIGTERM);
      },
      testing::ExitedWithCode(143), "");
}

}  // namespace
}  // namespace annulus
