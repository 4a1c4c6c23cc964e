// TCP between the hosts of a job, in plain steps that never block. Used by back_channel.cc and survey.cc.
//
// Thread safety: functions without state.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace annulus {

// The addresses of this host by which the others may reach it: those of `interfaces`, or of all that are up and no
// loopback, or the loopback's where there is no other. IPv4 before IPv6, none that is valid on one link alone.
// Error(kUsage): an interface that this host does not have, or that has no address, naming those that have one.
std::vector<std::string> own_addresses(const std::vector<std::string>& interfaces);

// A socket that listens on a free port of all addresses, non-blocking. Error(kResource).
struct Listener {
  int fd = -1;
  int port = 0;
};
Listener listen_anywhere();

// "10.0.0.1:4000", "[fd00::2]:4000"
std::string endpoint_text(const std::string& address, int port);

// Begins to connect. Returns a non-blocking descriptor, or -1 with errno.
int begin_connect(const std::string& address, int port);
// How the attempt went, once the descriptor can be written: 0 or an errno.
int connect_error(int fd);

// As many descriptors as this process may have at most: a connection for each host, or some for each rank. Returns how
// many these are.
int64_t raise_file_limit();

// Up to `timeout` for one descriptor; false where the time is over.
bool wait_for(int fd, short events, std::chrono::steady_clock::time_point deadline);

// The first line without its end, once it has come whole; what follows it stays in the socket. `text` keeps what came
// so far. kClosed also for a line of more than `longest` bytes.
enum class LineState { kWaiting, kWhole, kClosed };
LineState read_line(int fd, std::string& text, size_t longest);

// All of it, waiting for room until `deadline`; false where the other side is gone or does not read.
bool write_all(int fd, std::string_view bytes, std::chrono::steady_clock::time_point deadline);

}  // namespace annulus
