// The back channel: connections from processes on a job's hosts to the launcher, over TCP. A survey sends its reports
// through it (survey.h), and ranks on other hosts what they print and how they end (launcher/launch/rank.h), so that
// nothing depends on how mpirun cuts and mixes output.
//
// A connection begins with one line, TOKEN KIND NUMBER STREAM, which the launcher answers with "ok": the token is 128
// random bits made for this launch, and who does not say it is dropped. It travels in the environment (ANNULUS_BACK),
// not on a command line. Nothing is encrypted, as between the ranks. Thread safety: one thread at a time.
#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

namespace annulus {

class BackChannel {
 public:
  // Listens on a free port of all addresses, and offers those of `interfaces` (own_addresses in sockets.h).
  // Error(kUsage): an interface that this host does not have, naming those it has; Error(kResource).
  explicit BackChannel(const std::vector<std::string>& interfaces);
  ~BackChannel();
  BackChannel(const BackChannel&) = delete;
  BackChannel& operator=(const BackChannel&) = delete;

  // The value of ANNULUS_BACK: addresses, port and token.
  const std::string& address() const { return address_; }

  // To be polled; accept() when it can be read.
  int fd() const { return fd_; }

  struct Caller {
    int fd = -1;         // non-blocking, close-on-exec; the taker closes it
    std::string kind;    // "survey", "rank"
    int number = 0;      // of the rank or the host
    std::string stream;  // "out", "err", "control", "report"
  };
  // Those whose first line has come whole; never blocks. Strangers, and who says nothing for 10 s, are dropped.
  // Error(kResource) where no more files may be open.
  std::vector<Caller> accept();
  // Descriptors of connections whose first line is not whole yet, to be polled too.
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

// Connects to the channel `back` (BackChannel::address) by the first of its addresses that answers, for up to `timeout`
// together. A blocking, close-on-exec socket, or -1 and what was tried: "10.0.0.2:41234 (Connection refused), ...".
int reach(std::string_view back, std::string_view kind, int number, std::string_view stream,
          std::chrono::milliseconds timeout, std::string& tried);

// The same for the launcher's, with an error for its user: a blocking, close-on-exec socket, for `back` from
// ANNULUS_BACK. Error(kUnavailable) names what was tried, why it failed and what to do.
int call_back(std::string_view back, std::string_view kind, int number, std::string_view stream,
              std::chrono::milliseconds timeout);

}  // namespace annulus
