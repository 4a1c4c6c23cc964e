// See interrupt.h. handle() calls only async-signal-safe functions, because it is also a signal handler.
#include "common/interrupt.h"

#include <signal.h>
#include <unistd.h>
#include <ctime>

#include <atomic>
#include <initializer_list>
#include <thread>
#include <utility>

namespace annulus {
namespace {

std::atomic<int> g_signal{0};
std::atomic<long> g_first_ms{0};
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<long>::is_always_lock_free);

constexpr long kSameRequestMs = 500;

long now_ms() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<long>(t.tv_sec) * 1000 + t.tv_nsec / 1000000;
}

// signal: 0 for a process that stops because another process got a signal.
int exit_code(int signal) { return 128 + (signal == SIGUSR1 || signal == 0 ? SIGTERM : signal); }

void handle(int signal) {
  int none = 0;
  if (g_signal.compare_exchange_strong(none, signal)) {
    g_first_ms = now_ms();
    return;
  }
  const long first = g_first_ms;  // 0: another thread is still recording the first signal
  if (signal != SIGPIPE && signal != SIGUSR1 && first != 0 && now_ms() - first >= kSameRequestMs)
    _exit(exit_code(signal));
}

}  // namespace

void install_interrupt_handlers(std::function<void(int signal)> arrived) {
  struct sigaction action {};
  action.sa_handler = handle;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigset_t requests;
  sigemptyset(&requests);
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1, SIGHUP, SIGPIPE}) {
    struct sigaction before {};
    sigaction(signal, nullptr, &before);
    if ((signal == SIGHUP || signal == SIGPIPE) && before.sa_handler == SIG_IGN) continue;
    // A thread that exists already does not block the signals, so one of them may come to it.
    sigaction(signal, &action, nullptr);
    // The system sends SIGPIPE to the thread that has written.
    if (signal != SIGPIPE) sigaddset(&requests, signal);
  }
  pthread_sigmask(SIG_BLOCK, &requests, nullptr);
  std::thread([requests, arrived = std::move(arrived)] {
    for (int signal = 0;;) {
      if (sigwait(&requests, &signal) != 0) continue;
      if (arrived) arrived(signal);
      handle(signal);
    }
  }).detach();
}

bool interrupted() { return g_signal != 0; }

int interrupt_exit_code() { return exit_code(g_signal); }

}  // namespace annulus
