// Signals of the launcher as something to read: Ctrl-C, SIGTERM, SIGUSR1, SIGHUP and the end of a child. Used by
// launch.
#pragma once

#include <signal.h>

#include <string>

namespace annulus {

// From its making on signals wait to be read, so that none comes between making things and being able to take them
// away. One at a time, made before any thread. Raises Error(kResource).
struct Signals {
  Signals();
  ~Signals();
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  // Reads what has come: the first signal that asks to stop, 0 where there was none. Ends of children are passed over.
  int take_request() const;

  int fd = -1;      // of signalfd, non-blocking
  sigset_t before;  // the mask that children are to have
};

// "signal 9 (Killed)"
std::string signal_text(int signal);

}  // namespace annulus
