// See launcher_socket.h.
#include "launcher/hosts/launcher_socket.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "common/checked_json.h"
#include "common/error.h"
#include "common/text.h"

namespace annulus {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kLongestHello = 256;
const std::string kAccepted = R"({"accepted":true})";  // the answer to a right first message
constexpr size_t kSpare = 64;  // connections of strangers that are held besides those of callers
constexpr std::chrono::seconds kHelloTime{10};

std::string random_token() {
  std::array<unsigned char, 16> bytes{};
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    throw Error(ErrorKind::kResource, "launcher", std::string("cannot read random bits: ") + std::strerror(errno));
  }
  std::string text;
  for (const unsigned char byte : bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

// Compares in constant time, so that the time does not tell a caller how many characters of its token were right.
bool same_token(std::string_view a, std::string_view b) {
  unsigned different = a.size() == b.size() ? 0 : 1;
  for (size_t i = 0; i < a.size() && i < b.size(); ++i) different |= static_cast<unsigned>(a[i] ^ b[i]);
  return different == 0;
}

// After how many seconds without a word from the other side it counts as lost. The launcher, which says what is lost,
// gives up first: a host that hears nothing any more ends its ranks and closes its connections, and where packets are
// lost in one direction alone, this would arrive and look like another fault.
constexpr int kHostSilence = 8, kLauncherSilence = 12;

// With these settings, the loss of the other side is noticed after about `silence` seconds, whether this side has
// something to send or not. By default it might never be.
void keep_alive(int fd, int silence) {
  const int on = 1, idle = 3, interval = 1, count = silence - idle;
  const unsigned milliseconds = 1000U * static_cast<unsigned>(silence);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &milliseconds, sizeof milliseconds);
}

}  // namespace

std::optional<LauncherSocket::Connection> connection_of(const std::string& hello, std::string_view token) {
  try {
    const nlohmann::json value = message_of(parse_checked_json(hello, "launcher", "a connection"));
    const CheckedJson message(value, "launcher", "a connection");
    if (!same_token(message.at("token").text(), token)) return std::nullopt;
    return LauncherSocket::Connection{-1, message.at("purpose").text(),
                                      static_cast<int>(message.at("number").integer(0, INT32_MAX))};
  } catch (const Error&) {
    return std::nullopt;
  }
}

// A caller connects to all addresses at once.
LauncherSocket::LauncherSocket(const Listener& listener, size_t callers)
    : token_(random_token()),
      only_(listener.only_these ? listener.addresses : std::vector<std::string>()),
      fd_(listener.fd),
      most_pending_(callers * std::max<size_t>(listener.addresses.size(), 1) + kSpare) {
  raise_file_limit();
  address_ = token_ + "/" + std::to_string(listener.port) + "/" + join(listener.addresses, ",");
}

LauncherSocket::~LauncherSocket() {
  for (const Pending& one : pending_) close(one.fd);
  close(fd_);
}

void LauncherSocket::watch(std::vector<pollfd>& fds) const {
  fds.push_back({fd_, POLLIN, 0});
  for (const Pending& one : pending_) fds.push_back({one.fd, POLLIN, 0});
}

std::optional<Clock::time_point> LauncherSocket::deadline() const {
  return pending_.empty() ? std::nullopt : std::optional(pending_.front().since + kHelloTime);
}

std::vector<LauncherSocket::Connection> LauncherSocket::accept() {
  std::vector<Connection> connections;
  // Bounded, so that callers without pause do not delay anything else.
  for (size_t i = 0; i < most_pending_; ++i) {
    const int fd = accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0 && (errno == EMFILE || errno == ENFILE)) {
      const int error = errno;
      if (!wait_for(fd_, POLLIN, Clock::now())) break;  // the system says so even if nobody calls
      take_first_messages(connections);
      if (drop_oldest()) continue;
      if (!connections.empty()) break;
      // Ignoring this would leave the caller waiting for an answer, and poll would report the socket as ready forever.
      throw Error(ErrorKind::kResource, "launcher",
                  std::string("a connection from a rank or a host cannot be accepted: ") + std::strerror(error) +
                      (error == EMFILE ? "; raise the limit with ulimit -n N before the start"
                                       : "; raise the system's limit (sysctl fs.file-max)"));
    }
    if (fd < 0) break;
    if (!only_.empty() && std::find(only_.begin(), only_.end(), arrived_at(fd)) == only_.end()) {
      close(fd);
      continue;
    }
    keep_alive(fd, kHostSilence);
    pending_.push_back({fd, "", Clock::now()});
    if (pending_.size() <= most_pending_) continue;
    take_first_messages(connections);
    if (pending_.size() > most_pending_) drop_oldest();
  }
  take_first_messages(connections);
  return connections;
}

// Moves those whose first message is complete to `connections`, and closes those that are wrong or late.
void LauncherSocket::take_first_messages(std::vector<Connection>& connections) {
  for (Pending& one : pending_) {
    const LineState state = read_line(one.fd, one.text, kLongestHello);
    if (state == LineState::kWaiting && Clock::now() - one.since < kHelloTime) continue;
    std::optional<Connection> connection = state == LineState::kWhole ? connection_of(one.text, token_) : std::nullopt;
    if (connection && write_all(one.fd, kAccepted + "\n", Clock::now())) {
      connection->fd = one.fd;
      connections.push_back(std::move(*connection));
    } else {
      close(one.fd);
    }
    one.fd = -1;
  }
  std::erase_if(pending_, [](const Pending& one) { return one.fd < 0; });
}

// Closes the connection that has waited longest for its first message; false if there is none.
bool LauncherSocket::drop_oldest() {
  if (pending_.empty()) return false;
  close(pending_.front().fd);
  pending_.erase(pending_.begin());
  return true;
}

bool is_local_address(std::string_view address) {
  const size_t first = std::min(address.find('/'), address.size());
  return address.substr(first).starts_with("/0/");
}

int try_connect(std::string_view address, std::string_view purpose, int number, std::chrono::milliseconds timeout,
                std::string& tried) {
  const size_t first = address.find('/'), second = std::min(address.find('/', first + 1), address.size());
  const int port =
      first < second ? number_of_text<int>(address.substr(first + 1, second - first - 1)).value_or(-1) : -1;
  if (port < 0 || port > 65535 || second == address.size()) {
    tried = "\"" + std::string(address) + "\", which is not the address of a launcher";
    return -1;
  }
  const std::string all(address.substr(second + 1));
  const std::string hello =
      message_line({{"token", address.substr(0, first)}, {"purpose", purpose}, {"number", number}});
  const Clock::time_point deadline = Clock::now() + timeout;
  struct Attempt {
    std::string where;
    int fd;
    std::string why;
  };
  std::vector<Attempt> attempts;
  for (const std::string& one : port > 0 ? split(all, ',') : std::vector<std::string>{all}) {
    const int fd = begin_connect(one, port);
    attempts.push_back({endpoint_text(one, port), fd, fd < 0 ? std::strerror(errno) : ""});
  }
  const auto give_up = [](Attempt& attempt, const char* why) {
    close(attempt.fd);
    attempt.fd = -1;
    attempt.why = why;
  };
  // The addresses are tried in the order in which they connect, one at a time, because the launcher must receive this
  // stream only once.
  for (;;) {
    std::vector<pollfd> fds;
    for (const Attempt& attempt : attempts) {
      if (attempt.fd >= 0) fds.push_back({attempt.fd, POLLOUT, 0});
    }
    if (fds.empty()) break;
    if (Clock::now() >= deadline) break;
    if (poll_until(fds, deadline) <= 0) continue;
    for (const pollfd& ready : fds) {
      if (ready.revents == 0) continue;
      Attempt& attempt =
          *std::find_if(attempts.begin(), attempts.end(), [&](const Attempt& a) { return a.fd == ready.fd; });
      if (const int error = connect_error(attempt.fd); error != 0) {
        give_up(attempt, std::strerror(error));
        continue;
      }
      std::string answer;
      LineState state = LineState::kWaiting;
      if (write_all(attempt.fd, hello, deadline)) {
        while ((state = read_line(attempt.fd, answer, kLongestHello)) == LineState::kWaiting &&
               wait_for(attempt.fd, POLLIN, deadline)) {
        }
      }
      if (state != LineState::kWhole || answer != kAccepted) {
        give_up(attempt, state == LineState::kWaiting ? "it does not answer" : "something else answers there");
        continue;
      }
      const int fd = attempt.fd;
      for (Attempt& other : attempts) {
        if (other.fd >= 0 && other.fd != fd) close(other.fd);
      }
      fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
      keep_alive(fd, kLauncherSilence);
      return fd;
    }
  }
  std::vector<std::string> texts;
  for (Attempt& attempt : attempts) {
    if (attempt.fd >= 0) give_up(attempt, std::strerror(ETIMEDOUT));
    texts.push_back(attempt.where + " (" + attempt.why + ")");
  }
  tried = join(texts, ", ");
  return -1;
}

int connect_to_launcher(std::string_view address, std::string_view purpose, int number,
                        std::chrono::milliseconds timeout) {
  std::string tried;
  const int fd = try_connect(address, purpose, number, timeout, tried);
  if (fd >= 0) return fd;
  throw Error(ErrorKind::kUnavailable, "launcher",
              "the launcher cannot be reached from this host: tried " + tried +
                  "; name the interfaces that connect the hosts with `launch --interfaces`, and let firewalls pass TCP "
                  "between the hosts");
}

}  // namespace annulus
