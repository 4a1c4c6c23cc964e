// The socket on which a launcher accepts connections from the processes of its job: TCP from several hosts, a Unix
// socket where all are on one host. The processes that discover hosts send their reports through it (host_discovery.h),
// and ranks what they print and how they end (launcher/launch/rank.h), so that the output does not depend on how mpirun
// splits and interleaves it.
//
// A connection begins with one message, {"token", "purpose", "number"}, which the launcher answers with
// {"accepted": true}. The token is 128 random bits made for this launch; connections without it are closed, and where
// the job's interfaces are named, so are those that arrive at another one. Processes
// get it through the environment (ANNULUS_LAUNCHER), not through a command line. Nothing is encrypted, and neither is
// what ranks send to one another. Thread safety: one thread at a time.
#pragma once

#include <poll.h>

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "launcher/hosts/sockets.h"

namespace annulus {

class LauncherSocket {
 public:
  // `callers` is the number of processes that may connect at the same time.
  explicit LauncherSocket(const Listener& listener, size_t callers = 1024);
  ~LauncherSocket();
  LauncherSocket(const LauncherSocket&) = delete;
  LauncherSocket& operator=(const LauncherSocket&) = delete;

  // The value of ANNULUS_LAUNCHER: token, port and addresses.
  const std::string& address() const { return address_; }

  // Adds the descriptors to poll. Call accept() when one is readable, and at deadline().
  void watch(std::vector<pollfd>& fds) const;
  // When accept() must be called at the latest, because a connection will have sent nothing for too long.
  std::optional<std::chrono::steady_clock::time_point> deadline() const;

  struct Connection {
    int fd = -1;          // non-blocking, close-on-exec; the receiver must close it
    std::string purpose;  // "host", "peer"; of a rank: "control", "out", "err"; of the watch it started: "watch"
    int number = 0;       // the number of the rank or of the host
  };
  // The connections whose first message is now complete. Never blocks. Closes connections with a wrong first message,
  // those that have sent none for 10 s, and the oldest without one if they are more than the callers account for or
  // take the last open files. So strangers cannot end a job. Throws Error(kResource) if the process or the system has
  // too many open files, although no connection waits for its first message.
  std::vector<Connection> accept();

 private:
  struct Pending {
    int fd;
    std::string text;
    std::chrono::steady_clock::time_point since;
  };
  void take_first_messages(std::vector<Connection>& connections);
  bool drop_oldest();

  std::string token_, address_;
  std::vector<std::string> only_;  // the addresses at which connections may arrive; empty: any
  int fd_ = -1;
  size_t most_pending_ = 0;
  std::vector<Pending> pending_;  // the oldest first
};

// The connection that begins with this message, without its descriptor; nothing if the message is wrong or has not this
// token.
std::optional<LauncherSocket::Connection> connection_of(const std::string& hello, std::string_view token);

// Whether `address` (LauncherSocket::address) is that of a Unix socket, which other hosts cannot reach.
bool is_local_address(std::string_view address);

// Connects to the socket at `address` (LauncherSocket::address) through the first of its addresses that answers, and
// tries all of them for up to `timeout`. Returns a blocking, close-on-exec socket, or -1 and in `tried` what failed:
// "10.0.0.2:41234 (Connection refused), ...".
int try_connect(std::string_view address, std::string_view purpose, int number, std::chrono::milliseconds timeout,
                std::string& tried);

// Connects to the launcher, whose address is that of ANNULUS_LAUNCHER. Returns a blocking, close-on-exec socket. Throws
// Error(kUnavailable), which says what was tried, why it failed and what to do.
int connect_to_launcher(std::string_view address, std::string_view purpose, int number,
                        std::chrono::milliseconds timeout);

}  // namespace annulus
