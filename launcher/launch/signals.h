// Lets the launcher read its signals from a descriptor: Ctrl-C, SIGTERM, SIGUSR1, SIGHUP and the end of a child. Used
// by launch.cc and supervisor.cc; exit_report.cc uses signal_text.
#pragma once

#include <signal.h>

#include <string>

namespace annulus {

// From its construction on, signals wait until they are read, so that none can end the launcher between making
// something and being able to remove it. Only one may exist at a time, and it must be made before any thread starts.
// The constructor throws Error(kResource).
struct Signals {
  Signals();
  ~Signals();
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  // Reads pending signals. Returns the first that asks to stop, or 0 if there is none; SIGCHLD is skipped.
  int take_request() const;

  int fd = -1;      // the descriptor of signalfd, non-blocking
  sigset_t before;  // the earlier signal mask, which children get
};

// "signal 9 (Killed)"
std::string signal_text(int signal);

}  // namespace annulus
