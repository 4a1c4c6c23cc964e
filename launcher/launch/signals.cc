// See signals.h.
#include "launcher/launch/signals.h"

#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "common/error.h"

namespace annulus {

Signals::Signals() {
  // Ctrl-C must work even if a shell started this program in the background with SIGINT ignored.
  signal(SIGINT, SIG_DFL);
  signal(SIGPIPE, SIG_IGN);
  sigset_t blocked;
  sigemptyset(&blocked);
  for (const int s : {SIGINT, SIGTERM, SIGUSR1, SIGCHLD}) sigaddset(&blocked, s);
  struct sigaction hangup {};
  sigaction(SIGHUP, nullptr, &hangup);
  if (hangup.sa_handler != SIG_IGN) sigaddset(&blocked, SIGHUP);  // under nohup, SIGHUP stays ignored
  sigprocmask(SIG_BLOCK, &blocked, &before);
  fd = signalfd(-1, &blocked, SFD_CLOEXEC | SFD_NONBLOCK);
  if (fd < 0) {
    throw Error(ErrorKind::kResource, "launcher", std::string("signalfd failed: ") + std::strerror(errno));
  }
}

int Signals::take_request() const {
  signalfd_siginfo info{};
  while (read(fd, &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
    if (info.ssi_signo != SIGCHLD) return static_cast<int>(info.ssi_signo);
  }
  return 0;
}

Signals::~Signals() { close(fd); }

std::string signal_text(int signal) { return "signal " + std::to_string(signal) + " (" + strsignal(signal) + ")"; }

}  // namespace annulus
