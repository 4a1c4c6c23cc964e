// Non-blocking pipes from which the launcher reads. Used by rank_streams.cc and supervisor.cc.
#pragma once

#include <unistd.h>

#include <array>
#include <cerrno>
#include <string>
#include <string_view>

namespace annulus {

// Throws Error(kResource) that names what failed, with the text of errno.
[[noreturn]] void refuse_call(const char* what);

// Makes a named pipe at `path` and returns a non-blocking descriptor to read from. Throws Error(kResource).
int open_fifo(const std::string& path);

// Reads what is available and passes it to sink(bytes). At the end of file it closes fd and sets it to -1.
template <typename Sink>
void drain(int& fd, Sink&& sink) {
  std::array<char, 16384> buffer;
  // It reads at most about what a pipe holds, so that a rank that prints without pause does not delay signals and
  // deadlines.
  for (int i = 0; fd >= 0 && i < 16; ++i) {
    const ssize_t n = read(fd, buffer.data(), buffer.size());
    if (n > 0) {
      sink(std::string_view(buffer.data(), static_cast<size_t>(n)));
    } else if (n == 0) {
      close(fd);
      fd = -1;
    } else if (errno != EINTR) {
      return;
    }
  }
}

}  // namespace annulus
