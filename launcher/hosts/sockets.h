// Connections between the processes of a job: TCP between hosts, Unix sockets on one host. They are non-blocking and
// have deadlines. Messages are JSON values, one a line. Used by launcher/hosts/ and launcher/launch/.
//
// Thread safe: functions without state.
#pragma once

#include <poll.h>

#include <chrono>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace annulus {

// The addresses at which other hosts may reach this one: those of `interfaces`, or else of all interfaces that are up
// except the loopback, or else the loopback's. IPv4 comes before IPv6; link-local IPv6 addresses are left out. Throws
// Error(kUsage) for an interface that this host does not have or that has no address; the message names those that have
// one.
std::vector<std::string> own_addresses(const std::vector<std::string>& interfaces);

// A non-blocking socket that listens. `port` is 0 for a Unix socket, whose only address is its path.
struct Listener {
  int fd = -1;
  int port = 0;
  std::vector<std::string> addresses = {};
  bool only_these = false;  // whether connections to other addresses of this host are to be refused (arrived_at)
};
// Listens on a free TCP port, and lists own_addresses(interfaces). If interfaces are named and have one address, only
// that one is bound, otherwise all are. Throws what own_addresses throws, and Error(kResource).
Listener listen_tcp(const std::vector<std::string>& interfaces);
// Listens at a path that does not exist yet. Throws Error(kResource).
Listener listen_unix(const std::string& path);

// The address of this host to which the other side of a TCP connection has connected; empty if it is not known.
std::string arrived_at(int fd);

// "10.0.0.1:4000", "[fd00::2]:4000", "/dev/shm/launcher"
std::string endpoint_text(const std::string& address, int port);

// Begins to connect. Returns a non-blocking descriptor, or -1 and sets errno.
int begin_connect(const std::string& address, int port);
// The result of the attempt, once the descriptor is writable: 0 or an errno.
int connect_error(int fd);

// Raises the limit on open files to the hard limit, because there is a connection for each host, or several for each
// rank. Returns the limit.
int64_t raise_file_limit();

// poll(), but until a point in time, or without an end.
int poll_until(std::vector<pollfd>& fds, std::optional<std::chrono::steady_clock::time_point> deadline);
// The earlier of two points in time, of which either may be missing.
std::optional<std::chrono::steady_clock::time_point> earlier(std::optional<std::chrono::steady_clock::time_point> a,
                                                             std::optional<std::chrono::steady_clock::time_point> b);
// Waits for `events` on one descriptor until `deadline`. Returns false if the time is over or polling failed.
bool wait_for(int fd, short events, std::chrono::steady_clock::time_point deadline);

// Reads what is available, at most about as much as a pipe or a socket holds, so that a process that prints without
// pause does not delay anything else. At the end of file it closes fd and sets it to -1.
std::string read_available(int& fd);

constexpr size_t kLongestMessage = size_t{64} << 20;

// The line of a message. Paths and other texts of the system may not be UTF-8, so a text is sent byte by byte: each
// byte as the character whose code point is its value.
std::string message_line(const nlohmann::json& message);
// The message of a line that has been parsed: with its texts as message_line took them. A text that it cannot have
// written stays as it is.
nlohmann::json message_of(nlohmann::json parsed);

// Appends to `text` what has arrived of one line, without the line break, and returns kWhole once the line is complete;
// the bytes after it stay in the socket. Returns kClosed if the connection has ended (errno says why: 0 if the other
// side has closed it), or if the line is longer than `longest` bytes.
enum class LineState { kWaiting, kWhole, kClosed };
LineState read_line(int fd, std::string& text, size_t longest = kLongestMessage);

// Writes all bytes, and waits until `deadline` where the socket is full. Returns false if the other side has gone or
// does not read.
bool write_all(int fd, std::string_view bytes, std::chrono::steady_clock::time_point deadline);

}  // namespace annulus
