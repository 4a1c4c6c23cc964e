// Tests of common/interrupt.h: the first signal requests a stop, a later one ends the process, and none disturbs
// a thread that computes.
#include "common/interrupt.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <initializer_list>
#include <thread>

namespace annulus::interrupt_test {
namespace {

// Sends these signals to this process, waits for the first request to stop, and exits with its code, or with 1 if there
// is none. Another thread handles the signals, so this one cannot tell that a signal has been ignored.
void end_after(std::initializer_list<int> signals) {
  install_interrupt_handlers();
  if (interrupted()) std::_Exit(2);
  for (const int signal : signals) kill(getpid(), signal);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(signals.size() == 0 ? 0 : 60);
  while (!interrupted() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  std::_Exit(interrupted() ? interrupt_exit_code() : 1);
}

TEST(Interrupt, FirstSignalSetsTheFlag) {
  EXPECT_EXIT(end_after({}), ::testing::ExitedWithCode(1), "");
  EXPECT_EXIT(end_after({SIGINT}), ::testing::ExitedWithCode(130), "");
  EXPECT_EXIT(end_after({SIGINT, SIGUSR1}), ::testing::ExitedWithCode(130), "");  // the same request from the launcher
  EXPECT_EXIT(end_after({SIGUSR1}), ::testing::ExitedWithCode(143), "");
  EXPECT_EXIT(end_after({SIGHUP}), ::testing::ExitedWithCode(129), "");
  EXPECT_EXIT(end_after({SIGPIPE}), ::testing::ExitedWithCode(141), "");
}

TEST(Interrupt, IgnoredSignalsStayIgnored) {
  const auto ignoring = [](int ignored) {
    std::signal(ignored, SIG_IGN);
    end_after({ignored, SIGUSR1});
  };
  // 143 is the exit code for SIGUSR1.
  EXPECT_EXIT(ignoring(SIGHUP), ::testing::ExitedWithCode(143), "") << "nohup";
  EXPECT_EXIT(ignoring(SIGPIPE), ::testing::ExitedWithCode(143), "");
}

TEST(Interrupt, TellsWhichSignalHasArrivedBeforeItSetsTheFlag) {
  const auto told = [] {
    static std::atomic<int> arrived = 0;
    install_interrupt_handlers([](int signal) { arrived = interrupted() ? 0 : signal; });
    kill(getpid(), SIGTERM);
    while (!interrupted()) std::this_thread::yield();
    std::_Exit(arrived == SIGTERM ? 7 : 1);
  };
  EXPECT_EXIT(told(), ::testing::ExitedWithCode(7), "");
}

// Repeats the signal for longer than the time after which a second Ctrl-C ends the process.
void ask_again_and_again(int signal) {
  install_interrupt_handlers();
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(700);
  while (std::chrono::steady_clock::now() < end) kill(getpid(), signal);
  std::_Exit(interrupted() ? 3 : 1);
}

// A run that is stopping continues to write to the closed pipe.
TEST(InterruptDeathTest, RepeatedSigpipeDoesNotEndTheProcess) {
  EXPECT_EXIT(ask_again_and_again(SIGPIPE), ::testing::ExitedWithCode(3), "");
}

TEST(InterruptDeathTest, RepeatedRequestOfTheLauncherDoesNotEndTheProcess) {
  EXPECT_EXIT(ask_again_and_again(SIGUSR1), ::testing::ExitedWithCode(3), "");
}

TEST(InterruptDeathTest, SecondSignalEndsTheProcess) {
  EXPECT_EXIT(
      {
        install_interrupt_handlers();
        while (true) kill(getpid(), SIGTERM);
      },
      ::testing::ExitedWithCode(143), "");
}

// Fills the memory below its stack pointer, has signals sent, and exits with the number of bytes that have changed (255
// for more). It calls nothing while it looks, because each call would write there.
[[gnu::noinline]] void look_below_the_stack(std::atomic<int>& turn) {
  constexpr int kUsedByThisFunction = 1024, kLooked = 8192;
  volatile char* const top = static_cast<volatile char*>(__builtin_frame_address(0)) - kUsedByThisFunction;
  for (int i = 0; i < kLooked; ++i) top[-i] = 'x';
  turn.store(1, std::memory_order_seq_cst);
  while (turn.load(std::memory_order_seq_cst) != 2) continue;
  int changed = 0;
  for (int i = 0; i < kLooked; ++i) changed += top[-i] != 'x' ? 1 : 0;
  std::_Exit(changed < 255 ? changed : 255);
}

// Sends a signal to this process again and again, each time after the last one has been taken by another thread.
void send_often(int signal) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, signal);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  for (int i = 0; i < 100; ++i) {
    kill(getpid(), signal);
    for (sigset_t pending = set; sigismember(&pending, signal) == 1; sigpending(&pending)) std::this_thread::yield();
  }
}

TEST(InterruptDeathTest, NothingIsWrittenBelowTheStackOfTheComputingThread) {
  EXPECT_EXIT(
      {
        install_interrupt_handlers();
        std::atomic<int> turn{0};
        std::thread([&turn] {
          while (turn != 1) std::this_thread::yield();
          send_often(SIGUSR1);
          if (!interrupted()) std::_Exit(255);
          turn = 2;
        }).detach();
        look_below_the_stack(turn);
      },
      ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace annulus::interrupt_test
