// See simulated_hosts.h.
#include "comm/testing/simulated_hosts.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "common/error.h"

namespace annulus::testing {
namespace {

// The socket at which mpi_runner.py listens.
const char* socket_path() { return std::getenv("ANNULUS_TEST_HOSTS"); }

std::string text_of(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.17g", value);
  return text;
}

[[noreturn]] void fail(const std::string& request, int number) {
  throw Error(ErrorKind::kResource, "testing",
              request + ": the test's runner at " + socket_path() + " cannot be asked: " + std::strerror(number));
}

// Asks the runner: one line with the words of the request, whose answer is a line "ok", or an error's kind and text.
void ask(const std::string& request) {
  if (!on_simulated_host()) {
    throw Error(ErrorKind::kUsage, "testing",
                request +
                    ": expected simulated hosts, but this process was started without; start the test by "
                    "mpi_test(hosts = 2) or annulus_add_mpi_test(... HOSTS 2)");
  }
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, socket_path(), sizeof address.sun_path - 1);
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) fail(request, errno);
  std::string answer;
  const std::string line = request + "\n";
  bool fine = ::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 &&
              ::send(fd, line.data(), line.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(line.size());
  while (fine && (answer.empty() || answer.back() != '\n')) {
    char part[512];
    const ssize_t got = ::recv(fd, part, sizeof part, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got == 0) errno = ECONNRESET;
    fine = got > 0;
    if (fine) answer.append(part, static_cast<size_t>(got));
  }
  const int number = errno;
  ::close(fd);
  if (!fine) fail(request, number);
  answer.pop_back();
  if (answer == "ok") return;
  const bool usage = answer.rfind("usage: ", 0) == 0;
  throw Error(usage ? ErrorKind::kUsage : ErrorKind::kUnavailable, "testing",
              request + ": " + answer.substr(answer.find(": ") + 2));
}

}  // namespace

bool on_simulated_host() { return socket_path() != nullptr && *socket_path() != '\0'; }

void cut_host(const std::string& host) { ask("cut " + host); }
void mend_host(const std::string& host) { ask("mend " + host); }
void limit_host(const std::string& host, double bytes_per_second) {
  ask("limit " + host + " " + text_of(bytes_per_second));
}
void disturb_host(const std::string& host, double milliseconds, double loss) {
  ask("disturb " + host + " " + text_of(milliseconds) + " " + text_of(loss));
}
void kill_host(const std::string& host) { ask("kill " + host); }

}  // namespace annulus::testing
