// See sockets.h.
#include "launcher/hosts/sockets.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "common/descriptor.h"
#include "common/error.h"
#include "common/text.h"
#include "launcher/topology/host.h"

namespace annulus {
namespace {

[[noreturn]] void refuse_call(const char* what) {
  throw Error(ErrorKind::kResource, "launcher", std::string(what) + " failed: " + std::strerror(errno));
}

constexpr int kBacklog = 1024;

bool is_ipv6(const std::string& address) { return address.find(':') != std::string::npos; }

bool is_path(const std::string& address) { return address.starts_with('/'); }

// A name for the path of a Unix socket that fits into an address, which holds 107 bytes: the path itself, or one
// through a descriptor of its folder, which must stay open while the name is used. TMPDIR may be longer than that.
struct LocalName {
  explicit LocalName(const std::string& path)
      : folder(path.size() < sizeof sockaddr_un::sun_path
                   ? -1
                   : open(std::filesystem::path(path).parent_path().c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC)),
        name(folder < 0
                 ? path
                 : "/proc/self/fd/" + std::to_string(folder) + "/" + std::filesystem::path(path).filename().string()) {}

  const Descriptor folder;
  const std::string name;
};

// `size` is 0 if there is no such address.
sockaddr_storage socket_address(const std::string& address, int port, socklen_t& size) {
  sockaddr_storage storage{};
  if (is_path(address)) {
    auto* const local = reinterpret_cast<sockaddr_un*>(&storage);
    local->sun_family = AF_UNIX;
    size = address.size() < sizeof local->sun_path ? sizeof *local : 0;
    if (size > 0) address.copy(local->sun_path, address.size());
  } else if (is_ipv6(address)) {
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

std::string utf8_of_bytes(const std::string& bytes) {
  std::string text;
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x80) text += static_cast<char>(0xc0 | byte >> 6);
    text += byte < 0x80 ? c : static_cast<char>(0x80 | (byte & 0x3f));
  }
  return text;
}

std::string bytes_of_utf8(const std::string& text) {
  std::string bytes;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (byte < 0x80) {
      bytes += text[i];
    } else if ((byte == 0xc2 || byte == 0xc3) && i + 1 < text.size()) {
      bytes += static_cast<char>((byte & 3) << 6 | (static_cast<unsigned char>(text[++i]) & 0x3f));
    } else {
      return text;
    }
  }
  return bytes;
}

// The value with every text in it changed, also the names of members.
nlohmann::json with_texts(nlohmann::json value, std::string (*change)(const std::string&)) {
  if (value.is_string()) return change(value.get_ref<const std::string&>());
  if (value.is_object()) {
    nlohmann::json changed = nlohmann::json::object();
    for (auto& [name, member] : value.items()) changed[change(name)] = with_texts(std::move(member), change);
    return changed;
  }
  if (value.is_array()) {
    for (nlohmann::json& one : value) one = with_texts(std::move(one), change);
  }
  return value;
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

Listener listen_tcp(const std::vector<std::string>& interfaces) {
  Listener listener{.addresses = own_addresses(interfaces), .only_these = !interfaces.empty()};
  const bool one = listener.only_these && listener.addresses.size() == 1;
  const std::string only = one ? listener.addresses.front() : "";
  for (const int family : {AF_INET6, AF_INET}) {
    if (one && is_ipv6(only) != (family == AF_INET6)) continue;
    listener.fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (listener.fd < 0) continue;  // a kernel without IPv6
    const int off = 0;
    if (family == AF_INET6) setsockopt(listener.fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    socklen_t size = 0;
    sockaddr_storage address = socket_address(one ? only : family == AF_INET6 ? "::" : "0.0.0.0", 0, size);
    if (bind(listener.fd, reinterpret_cast<sockaddr*>(&address), size) == 0 && listen(listener.fd, kBacklog) == 0 &&
        getsockname(listener.fd, reinterpret_cast<sockaddr*>(&address), &size) == 0) {
      // The port is at the same offset in the addresses of both families.
      listener.port = ntohs(reinterpret_cast<sockaddr_in*>(&address)->sin_port);
      return listener;
    }
    close(listener.fd);
  }
  refuse_call("listening on a TCP port");
}

Listener listen_unix(const std::string& path) {
  socklen_t size = 0;
  const LocalName local(path);
  const sockaddr_storage address = socket_address(local.name, 0, size);
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0 || bind(fd, reinterpret_cast<const sockaddr*>(&address), size) != 0 || listen(fd, kBacklog) != 0) {
    refuse_call(("listening at " + path).c_str());
  }
  return {fd, 0, {path}};
}

std::string arrived_at(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return "";
  const void* const bytes = address.ss_family == AF_INET
                                ? static_cast<const void*>(&reinterpret_cast<sockaddr_in*>(&address)->sin_addr)
                                : &reinterpret_cast<sockaddr_in6*>(&address)->sin6_addr;
  if (inet_ntop(address.ss_family, bytes, text.data(), text.size()) == nullptr) return "";
  const std::string said = text.data();
  constexpr std::string_view kMapped = "::ffff:";  // IPv4 on a socket of both families
  return said.starts_with(kMapped) && said.find('.') != std::string::npos ? said.substr(kMapped.size()) : said;
}

std::string endpoint_text(const std::string& address, int port) {
  if (is_path(address)) return address;
  return (is_ipv6(address) ? "[" + address + "]" : address) + ":" + std::to_string(port);
}

int begin_connect(const std::string& address, int port) {
  socklen_t size = 0;
  const LocalName local(address);
  const sockaddr_storage target = socket_address(local.name, port, size);
  if (size == 0) {
    errno = EINVAL;
    return -1;
  }
  // A non-blocking connect to a Unix socket fails if many connect at once, instead of waiting in the queue.
  const int now = is_path(address) ? 0 : SOCK_NONBLOCK;
  const int fd = socket(target.ss_family, SOCK_STREAM | SOCK_CLOEXEC | now, 0);
  if (fd < 0) return -1;
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);  // short messages are sent at once
  if (connect(fd, reinterpret_cast<const sockaddr*>(&target), size) == 0 || errno == EINPROGRESS) {
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    return fd;
  }
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

int poll_until(std::vector<pollfd>& fds, std::optional<std::chrono::steady_clock::time_point> deadline) {
  using std::chrono::milliseconds;
  int64_t left = -1;
  if (deadline) {
    const auto time = std::chrono::ceil<milliseconds>(*deadline - std::chrono::steady_clock::now());
    left = std::clamp<int64_t>(time.count(), 0, 60000);
  }
  return poll(fds.data(), fds.size(), static_cast<int>(left));
}

std::optional<std::chrono::steady_clock::time_point> earlier(std::optional<std::chrono::steady_clock::time_point> a,
                                                             std::optional<std::chrono::steady_clock::time_point> b) {
  return a && b ? std::min(a, b) : a ? a : b;
}

bool wait_for(int fd, short events, std::chrono::steady_clock::time_point deadline) {
  std::vector<pollfd> one = {{fd, events, 0}};
  for (;;) {
    const int got = poll_until(one, deadline);
    if (got > 0) return true;
    if (got == 0 ? std::chrono::steady_clock::now() >= deadline : errno != EINTR) return false;
  }
}

std::string read_available(int& fd) {
  std::string text;
  std::array<char, 16384> buffer;
  for (int i = 0; fd >= 0 && i < 16; ++i) {
    const ssize_t n = read(fd, buffer.data(), buffer.size());
    if (n > 0) {
      text.append(buffer.data(), n);
    } else if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      break;
    } else if (n == 0 || errno != EINTR) {
      close(std::exchange(fd, -1));
    }
  }
  return text;
}

std::string message_line(const nlohmann::json& message) { return with_texts(message, utf8_of_bytes).dump() + "\n"; }

nlohmann::json message_of(nlohmann::json parsed) { return with_texts(std::move(parsed), bytes_of_utf8); }

LineState read_line(int fd, std::string& text, size_t longest) {
  std::array<char, 16384> buffer;
  for (;;) {
    const ssize_t seen = recv(fd, buffer.data(), buffer.size(), MSG_PEEK);
    if (seen < 0 && errno == EINTR) continue;
    if (seen < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? LineState::kWaiting : LineState::kClosed;
    if (seen == 0) {
      errno = 0;
      return LineState::kClosed;
    }
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
      bytes.remove_prefix(sent);
    } else if (errno != EINTR && (errno != EAGAIN || !wait_for(fd, POLLOUT, deadline))) {
      return false;
    }
  }
  return true;
}

}  // namespace annulus
