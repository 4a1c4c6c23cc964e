// The back channel: TCP connections from processes on a job's hosts to the launcher. A survey sends its reports through
// it (survey.h). Ranks on other hosts send what they print and how they end (launcher/launch/rank.h), so that the
// output does not depend on how mpirun splits and interleaves it.
//
// A connection begins with one line, TOKEN KIND NUMBER STREAM, which the launcher answers with "ok". The token is 128
// random bits made for this launch; connections without it are closed. Processes get it through the environment
// (ANNULUS_BACK), not through a command line. Nothing is encrypted, and neither is what ranks send to one another.
// Thread safety: one thread at a time.
#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

namespace annulus {

class BackChannel {
 public:
  // Listens on a free port on all addresses; address() lists those of `interfaces` (own_addresses in sockets.h).
  // Throws Error(kUsage) for an interface that this host does not have, and Error(kResource) if it cannot listen.
  explicit BackChannel(const std::vector<std::string>& interfaces);
  ~BackChannel();
  BackChannel(const BackChannel&) = delete;
  BackChannel& operator=(const BackChannel&) = delete;

  // The value of ANNULUS_BACK: addresses, port and token.
  const std::string& address() const { return address_; }

  // A descriptor to poll. Call accept() when it is readable.
  int fd() const { return fd_; }

  struct Caller {
    int fd = -1;         // non-blocking, close-on-exec; the receiver must close it
    std::string kind;    // "survey", "rank", "peer"
    int number = 0;      // the number of the rank or of the host
    std::string stream;  // "out", "err", "control", "report", "-"
  };
  // The connections whose first line is now complete. Never blocks. Closes connections with a wrong first line, and
  // those that have sent none for 10 s. Throws Error(kResource) if the process or the system has too many open files.
  std::vector<Caller> accept();
  // Descriptors of connections whose first line is not complete yet. Poll these as well.
  const std::vector<int>& pending() const { return pending_fds_; }

 private:
  struct Pending {
    int fd;
    std::string text;
    std::chrono::steady_clock::time_point since;
  };
  std::string token_, address_;
  int fd_ = -1;
  std::vector<Pending> pending_;
  std::vector<int> pending_fds_;
};

// Connects to the channel `back` (BackChannel::address) through the first of its addresses that answers, and tries all
// of them for up to `timeout`. Returns a blocking, close-on-exec socket, or -1 and in `tried` what failed:
// "10.0.0.2:41234 (Connection refused), ...".
int reach(std::string_view back, std::string_view kind, int number, std::string_view stream,
          std::chrono::milliseconds timeout, std::string& tried);

// Connects to the launcher, with `back` from ANNULUS_BACK. Returns a blocking, close-on-exec socket. Throws
// Error(kUnavailable), which says what was tried, why it failed and what to do.
int call_back(std::string_view back, std::string_view kind, int number, std::string_view stream,
              std::chrono::milliseconds timeout);

}  // namespace annulus
