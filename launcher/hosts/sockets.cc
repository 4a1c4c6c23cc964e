// See sockets.h.
#include "launcher/hosts/sockets.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "common/error.h"
#include "common/text.h"
#include "launcher/topology/host.h"

namespace annulus {
namespace {

[[noreturn]] void refuse_call(const char* what) {
  throw Error(ErrorKind::kResource, "launcher", std::string(what) + " failed: " + std::strerror(errno));
}

bool is_ipv6(const std::string& address) { return address.find(':') != std::string::npos; }

sockaddr_storage socket_address(const std::string& address, int port, socklen_t& size) {
  sockaddr_storage storage{};
  if (is_ipv6(address)) {
    auto* const six = reinterpret_cast<sockaddr_in6*>(&storage);
    six->sin6_family = AF_INET6;
    six->sin6_port = htons(static_cast<uint16_t>(port));
    size = inet_pton(AF_INET6, address.c_str(), &six->sin6_addr) == 1 ? sizeof *six : 0;
  } else {
    auto* const four = reinterpret_cast<sockaddr_in*>(&storage);
    four->sin_family = AF_INET;
    four->sin_port = htons(static_cast<uint16_t>(port));
    size = inet_pton(AF_INET, address.c_str(), &four->sin_addr) == 1 ? sizeof *four : 0;
  }
  return storage;
}

}  // namespace

std::vector<std::string> own_addresses(const std::vector<std::string>& interfaces) {
  std::vector<std::string> found, loopback, usable;
  const std::vector<NetInterface> all = network_interfaces();
  const auto add = [](const NetInterface& interface, std::vector<std::string>& to) {
    for (const std::string& address : interface.addresses) {
      if (!address.starts_with("fe80:")) to.push_back(address.substr(0, address.find('/')));
    }
  };
  for (const NetInterface& interface : all) {
    if (!interface.addresses.empty()) usable.push_back(interface.name);
    if (interfaces.empty() && interface.up) add(interface, interface.loopback ? loopback : found);
  }
  for (const std::string& name : interfaces) {
    const auto at = std::find_if(all.begin(), all.end(), [&](const NetInterface& i) { return i.name == name; });
    const size_t before = found.size();
    if (at != all.end() && at->up) add(*at, found);
    if (found.size() == before) {
      throw Error(ErrorKind::kUsage, "launcher",
                  "interface " + name + " of this job " +
                      (at == all.end() ? "is not on this host"
                       : at->up        ? "has no address on this host"
                                       : "is down on this host") +
                      "; interfaces with an address here: " + join(usable, ", "));
    }
  }
  if (found.empty()) found = loopback;
  std::stable_partition(found.begin(), found.end(), [](const std::string& address) { return !is_ipv6(address); });
  return found;
}

Listener listen_anywhere() {
  for (const int family : {AF_INET6, AF_INET}) {
    Listener listener;
    listener.fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (listener.fd < 0) continue;  // a kernel without IPv6
    const int off = 0;
    if (family == AF_INET6) setsockopt(listener.fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    socklen_t size = 0;
    sockaddr_storage address = socket_address(family == AF_INET6 ? "::" : "0.0.0.0", 0, size);
    if (bind(listener.fd, reinterpret_cast<sockaddr*>(&address), size) == 0 && listen(listener.fd, 1024) == 0 &&
        getsockname(listener.fd, reinterpret_cast<sockaddr*>(&address), &size) == 0) {
      // The port is at the same offset in the addresses of both families.
      listener.port = ntohs(reinterpret_cast<sockaddr_in*>(&address)->sin_port);
      return listener;
    }
    close(listener.fd);
  }
  refuse_call("listening on a TCP port");
}

std::string endpoint_text(const std::string& address, int port) {
  return (is_ipv6(address) ? "[" + address + "]" : address) + ":" + std::to_string(port);
}

int begin_connect(const std::string& address, int port) {
  socklen_t size = 0;
  const sockaddr_storage target = socket_address(address, port, size);
  if (size == 0) {
    errno = EINVAL;
    return -1;
  }
  const int fd = socket(target.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return -1;
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);  // short messages are sent at once
  if (connect(fd, reinterpret_cast<const sockaddr*>(&target), size) == 0 || errno == EINPROGRESS) return fd;
  const int error = errno;
  close(fd);
  errno = error;
  return -1;
}

int connect_error(int fd) {
  int error = 0;
  socklen_t size = sizeof error;
  return getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) == 0 ? error : errno;
}

int64_t raise_file_limit() {
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) return INT64_MAX;
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  return files.rlim_max > INT64_MAX ? INT64_MAX : static_cast<int64_t>(files.rlim_max);
}

bool wait_for(int fd, short events, std::chrono::steady_clock::time_point deadline) {
  for (;;) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
    pollfd one{fd, events, 0};
    const int got = poll(&one, 1, static_cast<int>(std::clamp<int64_t>(left, 0, 60000)));
    if (got > 0) return true;
    if (got == 0 && left <= 0) return false;
    if (got < 0 && errno != EINTR) return false;
  }
}

LineState read_line(int fd, std::string& text, size_t longest) {
  std::array<char, 16384> buffer;
  for (;;) {
    const ssize_t seen = recv(fd, buffer.data(), buffer.size(), MSG_PEEK);
    if (seen < 0 && errno == EINTR) continue;
    if (seen < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? LineState::kWaiting : LineState::kClosed;
    if (seen == 0) return LineState::kClosed;
    const auto* const end = static_cast<const char*>(std::memchr(buffer.data(), '\n', static_cast<size_t>(seen)));
    const size_t taken = end == nullptr ? static_cast<size_t>(seen) : static_cast<size_t>(end - buffer.data()) + 1;
    if (recv(fd, buffer.data(), taken, 0) != static_cast<ssize_t>(taken)) return LineState::kClosed;
    text.append(buffer.data(), taken - (end == nullptr ? 0 : 1));
    if (text.size() > longest) return LineState::kClosed;
    if (end != nullptr) return LineState::kWhole;
  }
}

bool write_all(int fd, std::string_view bytes, std::chrono::steady_clock::time_point deadline) {
  while (!bytes.empty()) {
    const ssize_t sent = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent > 0) {
      bytes.remove_prefix(static_cast<size_t>(sent));
    } else if (errno != EINTR && (errno != EAGAIN || !wait_for(fd, POLLOUT, deadline))) {
      return false;
    }
  }
  return true;
}

}  // namespace annulus
