// Tests of common/interrupt.h: the first signal requests a stop, a later one ends the process.
#include "common/interrupt.h"

#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <initializer_list>

namespace annulus {
namespace {

// Raises these signals and exits with the exit code of the request to stop, or with 1 if there is none.
void end_after(std::initializer_list<int> signals) {
  install_interrupt_handlers();
  if (interrupted()) std::_Exit(2);
  for (const int signal : signals) raise(signal);
  std::_Exit(interrupted() ? interrupt_exit_code() : 1);
}

TEST(Interrupt, FirstSignalSetsTheFlag) {
  EXPECT_EXIT(end_after({}), testing::ExitedWithCode(1), "");
  EXPECT_EXIT(end_after({SIGINT}), testing::ExitedWithCode(130), "");
  EXPECT_EXIT(end_after({SIGINT, SIGUSR1}), testing::ExitedWithCode(130), "");  // the same request from the launcher
  EXPECT_EXIT(end_after({SIGUSR1}), testing::ExitedWithCode(143), "");
  EXPECT_EXIT(end_after({SIGHUP}), testing::ExitedWithCode(129), "");
  EXPECT_EXIT(end_after({SIGPIPE}), testing::ExitedWithCode(141), "");
}

TEST(Interrupt, IgnoredSignalsStayIgnored) {
  const auto ignoring = [](int ignored) {
    std::signal(ignored, SIG_IGN);
    end_after({ignored});
  };
  EXPECT_EXIT(ignoring(SIGHUP), testing::ExitedWithCode(1), "") << "nohup";
  EXPECT_EXIT(ignoring(SIGPIPE), testing::ExitedWithCode(1), "");
}

// Repeats the signal for longer than the time after which a second Ctrl-C ends the process.
void ask_again_and_again(int signal) {
  install_interrupt_handlers();
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(700);
  while (std::chrono::steady_clock::now() < end) raise(signal);
  std::_Exit(interrupted() ? 3 : 1);
}

// A run that is stopping continues to write to the closed pipe.
TEST(InterruptDeathTest, RepeatedSigpipeDoesNotEndTheProcess) {
  EXPECT_EXIT(ask_again_and_again(SIGPIPE), testing::ExitedWithCode(3), "");
}

TEST(InterruptDeathTest, RepeatedRequestOfTheLauncherDoesNotEndTheProcess) {
  EXPECT_EXIT(ask_again_and_again(SIGUSR1), testing::ExitedWithCode(3), "");
}

TEST(InterruptDeathTest, SecondSignalEndsTheProcess) {
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
