// The first signal asks, a later one ends.
#include "common/interrupt.h"

#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <initializer_list>

namespace annulus {
namespace {

// What a process ends with that gets these signals at once: its own exit code for a request, or 1 where none is seen.
void end_after(std::initializer_list<int> signals) {
  install_interrupt_handlers();
  if (interrupted()) std::_Exit(2);
  for (const int signal : signals) raise(signal);
  std::_Exit(interrupted() ? interrupt_exit_code() : 1);
}

TEST(Interrupt, TheFirstSignalSetsTheFlag) {
  EXPECT_EXIT(end_after({}), testing::ExitedWithCode(1), "");
  EXPECT_EXIT(end_after({SIGINT}), testing::ExitedWithCode(130), "");
  EXPECT_EXIT(end_after({SIGINT, SIGUSR1}), testing::ExitedWithCode(130), "");  // the same request by another way
  EXPECT_EXIT(end_after({SIGUSR1}), testing::ExitedWithCode(143), "");
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
