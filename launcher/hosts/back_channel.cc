// See back_channel.h.
#include "launcher/hosts/back_channel.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstring>

#include "common/error.h"
#include "common/text.h"
#include "launcher/hosts/sockets.h"

namespace annulus {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kLongestHello = 256;
constexpr size_t kMostPending = 4096;
constexpr std::chrono::seconds kHelloTime{10};
constexpr const char* kAnswer = "ok\n";

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

// With these settings, the loss of a host is noticed in about 15 s. By default it might never be.
void keep_alive(int fd) {
  const int on = 1, idle = 5, interval = 3, count = 3;
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
}

}  // namespace

BackChannel::BackChannel(const std::vector<std::string>& interfaces) : token_(random_token()) {
  const std::vector<std::string> addresses = own_addresses(interfaces);
  raise_file_limit();
  const Listener listener = listen_anywhere();
  fd_ = listener.fd;
  address_ = token_ + "/" + std::to_string(listener.port) + "/" + join(addresses, ",");
}

BackChannel::~BackChannel() {
  for (const Pending& one : pending_) close(one.fd);
  if (fd_ >= 0) close(fd_);
}

std::vector<BackChannel::Caller> BackChannel::accept() {
  for (;;) {
    const int fd = accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    // Ignoring this would leave the caller waiting for an answer, and poll would report the socket as ready forever.
    if (fd < 0 && (errno == EMFILE || errno == ENFILE)) {
      throw Error(ErrorKind::kResource, "launcher",
                  std::string("a connection from a rank or a host cannot be accepted: ") + std::strerror(errno) +
                      (errno == EMFILE ? "; raise the limit with ulimit -n N before the start"
                                       : "; raise the system's limit (sysctl fs.file-max)"));
    }
    if (fd < 0) break;
    if (pending_.size() >= kMostPending) {
      close(fd);
      continue;
    }
    keep_alive(fd);
    pending_.push_back({fd, "", Clock::now()});
  }
  std::vector<Caller> callers;
  for (Pending& one : pending_) {
    const LineState state = read_line(one.fd, one.text, kLongestHello);
    if (state == LineState::kWaiting && Clock::now() - one.since < kHelloTime) continue;
    const std::vector<std::string> words = split(one.text, ' ');
    Caller caller{one.fd, "", -1, ""};
    if (state == LineState::kWhole && words.size() == 4 && same_token(words[0], token_)) {
      std::from_chars(words[2].data(), words[2].data() + words[2].size(), caller.number);
      caller.kind = words[1];
      caller.stream = words[3];
    }
    if (caller.number >= 0 && write_all(one.fd, kAnswer, Clock::now())) {
      callers.push_back(std::move(caller));
    } else {
      close(one.fd);
    }
    one.fd = -1;
  }
  std::erase_if(pending_, [](const Pending& one) { return one.fd < 0; });
  pending_fds_.clear();
  for (const Pending& one : pending_) pending_fds_.push_back(one.fd);
  return callers;
}

int reach(std::string_view back, std::string_view kind, int number, std::string_view stream,
          std::chrono::milliseconds timeout, std::string& tried) {
  const std::vector<std::string> parts = split(back, '/');
  int port = 0;
  if (parts.size() == 3) std::from_chars(parts[1].data(), parts[1].data() + parts[1].size(), port);
  if (port < 1 || port > 65535) {
    tried = "\"" + std::string(back) + "\", which is not the address of a launcher";
    return -1;
  }
  const std::string hello =
      parts[0] + " " + std::string(kind) + " " + std::to_string(number) + " " + std::string(stream) + "\n";
  const Clock::time_point deadline = Clock::now() + timeout;
  struct Attempt {
    std::string where;
    int fd;
    std::string why;
  };
  std::vector<Attempt> attempts;
  for (const std::string& address : split(parts[2], ',')) {
    const int fd = begin_connect(address, port);
    attempts.push_back({endpoint_text(address, port), fd, fd < 0 ? std::strerror(errno) : ""});
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
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) break;
    if (poll(fds.data(), fds.size(), static_cast<int>(std::min<int64_t>(left, 60000))) <= 0) continue;
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
      if (state != LineState::kWhole || answer + "\n" != kAnswer) {
        give_up(attempt, state == LineState::kWaiting ? "it does not answer" : "something else answers there");
        continue;
      }
      const int fd = attempt.fd;
      for (Attempt& other : attempts) {
        if (other.fd >= 0 && other.fd != fd) close(other.fd);
      }
      fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
      keep_alive(fd);
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

int call_back(std::string_view back, std::string_view kind, int number, std::string_view stream,
              std::chrono::milliseconds timeout) {
  std::string tried;
  const int fd = reach(back, kind, number, stream, timeout, tried);
  if (fd >= 0) return fd;
  throw Error(ErrorKind::kUnavailable, "launcher",
              "the launcher cannot be reached from this host: tried " + tried +
                  "; name the interfaces that connect the hosts with `launch --interfaces`, and let firewalls pass TCP "
                  "between the hosts");
}

}  // namespace annulus
