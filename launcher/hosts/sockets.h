// TCP between the hosts of a job, with non-blocking sockets and deadlines. Used by back_channel.cc, survey.cc,
// survey_answer.cc and launcher/launch/.
//
// Thread safe: functions without state.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace annulus {

// The addresses at which other hosts may reach this one: those of `interfaces`, or else of all interfaces that are up
// except the loopback, or else the loopback's. IPv4 comes before IPv6; link-local IPv6 addresses are left out. Throws
// Error(kUsage) for an interface that this host does not have or that has no address; the message names those that have
// one.
std::vector<std::string> own_addresses(const std::vector<std::string>& interfaces);

// A non-blocking socket that listens on a free port on all addresses. Throws Error(kResource).
struct Listener {
  int fd = -1;
  int port = 0;
};
Listener listen_anywhere();

// "10.0.0.1:4000", "[fd00::2]:4000"
std::string endpoint_text(const std::string& address, int port);

// Begins to connect. Returns a non-blocking descriptor, or -1 and sets errno.
int begin_connect(const std::string& address, int port);
// The result of the attempt, once the descriptor is writable: 0 or an errno.
int connect_error(int fd);

// Raises the limit on open files to the hard limit, because there is a connection for each host, or several for each
// rank. Returns the limit.
int64_t raise_file_limit();

// Waits for `events` on one descriptor until `deadline`. Returns false if the time is over or polling failed.
bool wait_for(int fd, short events, std::chrono::steady_clock::time_point deadline);

// Appends to `text` what has arrived of one line, without the line break, and returns kWhole once the line is complete;
// the bytes after it stay in the socket. Returns kClosed if the connection has ended, or if the line is longer than
// `longest` bytes.
enum class LineState { kWaiting, kWhole, kClosed };
LineState read_line(int fd, std::string& text, size_t longest);

// Writes all bytes, and waits for room until `deadline`. Returns false if the other side has gone or does not read.
bool write_all(int fd, std::string_view bytes, std::chrono::steady_clock::time_point deadline);

}  // namespace annulus
